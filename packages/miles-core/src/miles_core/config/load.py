"""From the words of a command line to a validated `Config`, or to every reason why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_tito.shared.plugins import Plugin
from pydantic import TypeAdapter, ValidationError

from .checks import Kind, check, unread, warnings
from .keys import KIND, NAME, KeyPath, is_plugin, leaves, names_at, tables_of, type_at, type_name, unions
from .layers import Layers, get, key_path, new_name, put, read_layers
from .problems import ConfigError, Problem, own_message, suggestion
from .schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `load_config` returns to a command: a checked configuration, and where it came from."""

    config: Config
    sources: Mapping[KeyPath, str]
    """For each key that was set: the file or flag that set it last."""
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    """What is allowed but has no effect, or is likely a mistake."""

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Where the user's modules are looked for first: beside each file, last one first, then here."""
        beside = [str(file.resolve().parent) for file in reversed(self.files)]
        return tuple(dict.fromkeys([*beside, str(Path.cwd())]))


def load_config(words: Sequence[str], *, kind: Kind | None = None, stored: Mapping[str, Any] | None = None) -> Loaded:
    """Read, merge, validate and check.

    Args:
        words: `@ FILE` (or a recipe's name) and `--dotted.key value`, in any number; later ones win, flags over files.
        kind: which command will run; None only checks what holds for all of them.
        stored: a whole configuration, as an earlier run kept it, that the words are laid over.

    Raises:
        ConfigError: lists every problem.
    """
    layers = read_layers(words)
    given = set(layers.sources)
    if stored is not None:
        layers = layers.over(stored)
    config, problems, repaired = validate(layers)
    if layers.problems:  # what an unreadable file holds cannot be missed by the checks below
        raise ConfigError([*layers.problems, *problems])
    problems += [
        Problem(layers.sources.get(path, ""), ".".join(path), message)
        for path, message in check(config, kind, given)
        if not any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in repaired)
    ]
    useless: dict[str, dict[str, None]] = {}
    for path, table, why in unread(config, kind, given):
        source = layers.sources[path]
        if source.startswith("--") and key_path(source[2:]) == path:  # said to this very command
            problems.append(Problem(source, ".".join(path), f"has no effect: {why}."))
        else:  # in a file, which other commands read too
            useless.setdefault(why, {})[".".join(table)] = None
    if problems:
        raise ConfigError(problems)
    return Loaded(
        config=config,
        sources=layers.sources,
        files=tuple(layers.files),
        warnings=(*warnings(config, kind), *(f"{', '.join(keys)}: no effect, {why}." for why, keys in useless.items())),
    )


def validate(layers: Layers) -> tuple[Config, list[Problem], list[KeyPath]]:
    """The configuration, its problems, and the keys that were left at their defaults because of a problem.

    pydantic skips the checks of a table while one of its keys is wrong, so wrong keys are taken out and the rest is
    validated again until nothing new is found.
    """
    table = json.loads(json.dumps(layers.table, default=str))  # a copy; dates, which no key takes, become text
    problems: list[Problem] = []
    removed: list[KeyPath] = []
    while True:
        found = dict(_wrong_kinds(table))
        if not found:
            try:
                # Strict JSON: lists are tuples there, but "8" is no number and true is not 1.
                return _ADAPTER.validate_json(json.dumps(table), strict=True), problems, removed
            except ValidationError as invalid:
                errors = [(_wrong_key(error, table), error) for error in invalid.errors(include_url=False)]
                found = {path: _message(error, path, table) for path, error in errors if path is not None}
        for path, message in found.items():
            if any(other != path and other[: len(path)] == path for other in found):
                continue  # a table with a wrong key inside, which is to go first
            problems.append(Problem(layers.sources.get(path, ""), ".".join(path), message))
            removed.append(path)
            if path:
                get(table, path[:-1]).pop(path[-1], None)
            else:
                table.clear()


_ADAPTER = TypeAdapter(Config)


def _wrong_kinds(table: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """The kinds that no table is of. Where none is said, the default one is filled in."""
    for union in unions(Config):
        own = get(table, union.path)
        if not isinstance(own, dict) or union.chosen(own.setdefault(KIND, union.default)) is not None:
            continue
        wrong = own[KIND]
        hint = suggestion(str(wrong), union.kinds)
        yield (*union.path, KIND), f"is {wrong!r}; it must be one of {', '.join(union.kinds)}.{hint}"
        put(table, union.path, {})  # which keys it should have had depends on the kind


def _wrong_key(error: Mapping[str, Any], table: Mapping[str, Any]) -> KeyPath | None:
    """The key to blame: where pydantic points, or the one that the error of a whole table names in backticks.

    None where pydantic tried a member of a union that the value is not meant for.
    """
    path: KeyPath = ()
    for part in error["loc"]:
        value = get(table, path)
        if _is_for_another(type_at(Config, path), path, value, part):
            return None
        if not isinstance(part, str) or not isinstance(value, dict):
            break  # an item of a list: the list is the key
        if part in value:
            path = (*path, part)
    if error["type"] == "value_error":
        for name in re.findall(r"`([\w.-]+)`", str(error["ctx"]["error"])):
            if get(table, (*path, *name.split("."))) is not None:
                return (*path, *name.split("."))
    return path


def _is_for_another(annotation: Any, path: KeyPath, value: Any, member: object) -> bool:
    """Whether `member`, as pydantic names those of a union, is another one than `value` is meant for."""
    if is_plugin(annotation):
        return member == ("str" if isinstance(value, dict) else Plugin.__name__)
    union = next((union for union in unions(Config) if union.path == path), None)
    chosen = union.chosen(get(value, (KIND,))) if union and isinstance(value, dict) else None
    return chosen is not None and member != chosen.__name__ and member in [t.__name__ for t in tables_of(annotation)]


def _message(error: Mapping[str, Any], path: KeyPath, table: Mapping[str, Any]) -> str:
    match error["type"]:
        case "unexpected_keyword_argument" if error["loc"][-1] == path[-1]:
            return _unknown(path, table)
        case "value_error":
            return own_message(error["ctx"]["error"])
        case "missing" if isinstance(error["loc"][-1], str):
            return f"needs `{error['loc'][-1]}`."
        case "literal_error":
            choices = [choice.strip("'") for choice in re.split(r", | or ", error["ctx"]["expected"])]
            wrong = str(error["input"])
            return f"is {wrong!r}; it must be one of {', '.join(choices)}.{suggestion(wrong, choices)}"
        case _:
            annotation = type_at(Config, path)
            wanted = "a table" if names_at(Config, path) and not is_plugin(annotation) else type_name(annotation)
            return f"is {json.dumps(get(table, path), default=str)}; it must be: {wanted}."


def _unknown(path: KeyPath, table: Mapping[str, Any]) -> str:
    """Where the key is now, or which kind has it, or near names in the same table, or where else one is called so."""
    if new := new_name(path):
        return f"is now {'.'.join(new)}. Write it there."
    *parent, name = path
    for union in unions(Config):
        if union.path == (*parent,) and (owners := union.owners(name)):
            chosen = get(table, (*parent, KIND))
            return f"belongs to kind {' and '.join(owners)}; kind is {json.dumps(chosen)}."
    return f"is no key.{_did_you_mean(path)}"


def _did_you_mean(path: KeyPath) -> str:
    """Near names in the same table; else the places where a key of that name exists."""
    *parent, name = path
    prefix = "".join(f"{part}." for part in parent)
    known = names_at(Config, parent)
    if near := suggestion(name, known, prefix=prefix):
        return near
    same = sorted((key for key in leaves(Config) if key.path[-1] == name), key=lambda key: NAME in key.path)
    elsewhere = dict.fromkeys(str(key) for key in same if NAME not in key.path or NAME in same[0].path)
    if elsewhere:
        return f" Did you mean {' or '.join([*elsewhere][:3])}?"
    return f" {prefix.rstrip('.') or 'The top level'} has: {', '.join(known)}." if known else ""
