"""A configuration as TOML that loads back to the same one, and a reference of every key."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .keys import KIND, NAME, KeyPath, kind_name, leaves, type_at, type_name
from .layers import get
from .schema import Config, to_dict


def to_toml(config: Config, *, sources: Mapping[KeyPath, str] | None = None, explain: bool = False) -> str:
    """The whole of `config`, defaults included.

    Args:
        sources: who set each key; named behind the value.
        explain: write each key's description over it.
    """
    table = to_dict(config)
    docs: dict[KeyPath, str] = {}
    for key in leaves(Config) if explain else ():
        if not key.kinds or kind_name(get(table, (*key.path[:-1], KIND))) in key.kinds:
            docs[key.path] = key.doc
    return "\n".join(_table(table, (), sources or {}, docs)).strip() + "\n"


def reference() -> str:
    """Every key with type, default and meaning, a Markdown table a section."""
    parts: list[str] = []
    section = ""
    for key in leaves(Config):
        if key.path[0] != section:
            section = key.path[0]
            description = _first_line(type_at(Config, (section,)))
            parts.append(f"\n## [{section}]\n\n{description}| key | type | default | meaning |\n|---|---|---|---|")
        only = f"With kind `{'`, `'.join(key.kinds)}`. " if key.kinds else ""
        cells = (f"`{key}`", type_name(key.type), f"`{_default(key.default)}`", f"{only}{key.doc}".strip())
        parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(parts).strip() + "\n"


def _table(
    table: Mapping[str, Any], path: KeyPath, sources: Mapping[KeyPath, str], docs: Mapping[KeyPath, str]
) -> Iterator[str]:
    """Values first, tables after them, as TOML needs it."""
    values = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    if path and (values or not tables):
        yield ""
        yield from _comment(docs.get(_generic(path)))
        yield f"[{'.'.join(map(_name, path))}]"
    for name, value in values.items():
        here = (*path, name)
        yield from _comment(docs.get(_generic(here)))
        comment = f"  # {sources[here]}" if here in sources else ""
        yield f"{_name(name)} = {_value(value)}{comment}"
    for name, value in tables.items():
        yield from _table(value, (*path, name), sources, docs)


def _comment(doc: str | None) -> list[str]:
    return textwrap.wrap(doc or "", 110, initial_indent="# ", subsequent_indent="# ")


def _value(value: Any) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case float() if math.isinf(value) or math.isnan(value):
            return str(value)
        case int() | float():
            return repr(value)
        case str():
            return _text(value)
        case Mapping():
            return "{" + ", ".join(f"{_name(str(name))} = {_value(item)}" for name, item in value.items()) + "}"
        case Sequence():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return _text(str(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _generic(path: KeyPath) -> KeyPath:
    """`engines.rollout.tp` as the reference names it, `engines.NAME.tp`."""
    for table in (("engines",), ("eval", "datasets")):
        if path[: len(table)] == table and len(path) > len(table):
            return (*table, NAME, *path[len(table) + 1 :])
    return path


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return "{}"
    return _value(list(value) if isinstance(value, tuple) else value)


def _first_line(section: Any) -> str:
    doc = getattr(section, "__doc__", None) if dataclasses.is_dataclass(section) else None
    return f"{doc.strip().splitlines()[0]}\n\n" if doc else ""
