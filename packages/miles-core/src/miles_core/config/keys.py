"""The keys that a configuration has, read off its dataclasses: type, default and the docstring under each field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

KeyPath = tuple[str, ...]
"""Where a key is: ("rollout", "sampling", "top_p")."""

FREE = object()
"""Stands for the type of a key inside a free table, such as `env.args`: anything goes."""

NAME = "NAME"
"""Stands for a name that the user chooses, such as that of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One leaf of the configuration."""

    path: KeyPath
    type: Any
    default: Any
    """`dataclasses.MISSING` where the table cannot do without it."""
    doc: str
    """The docstring under the field, as one paragraph."""

    def __str__(self) -> str:
        return ".".join(self.path)


def leaves(section: type, path: KeyPath = ()) -> Iterator[Key]:
    """Every leaf below `section`, in the order written."""
    docs = field_docs(section)
    for name, annotation in _fields(section).items():
        here = (*path, name)
        table, named = _table(annotation), _table(_items(annotation))
        if table is not None:
            yield from leaves(table, here)
        elif named is not None:
            yield from leaves(named, (*here, NAME))
        else:
            yield Key(path=here, type=annotation, default=_default(section, name), doc=docs.get(name, ""))


def type_at(section: type, path: Sequence[str]) -> Any:
    """The type of the key at `path`, FREE inside a free table, None where there is no such key."""
    annotation: Any = section
    for name in path:
        table, item = _table(annotation), _items(annotation)
        if table is not None:
            annotation = _fields(table).get(name)
        elif item is not None:
            annotation = item
        elif annotation is not FREE:
            return None
        if annotation is None:
            return None
        if annotation is Any:
            annotation = FREE
    return annotation


def names_at(section: type, path: Sequence[str]) -> list[str]:
    """The keys of the table at `path`; empty for a free table and for a leaf."""
    table = _table(type_at(section, path))
    return list(_fields(table)) if table is not None else []


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field, as one paragraph."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, follower in zip(tree.body, tree.body[1:], strict=False):
        match statement, follower:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs


def options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def type_name(annotation: Any) -> str:
    """The type as people write it in TOML."""
    parts = [_single_name(option) for option in options(annotation)]
    return " | ".join(dict.fromkeys(parts))


def _single_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): '"none"'}
    if annotation in simple:
        return simple[annotation]
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"list of {_single_name(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(_single_name(a) for a in arguments)}"
    if _items(annotation) is not None or dataclasses.is_dataclass(annotation):
        return "table"
    return "anything"


def _fields(section: type) -> dict[str, Any]:
    hints = _hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _table(annotation: Any) -> type | None:
    """The dataclass that `annotation` is, or is beside None. A plug-in, which may be a name alone, is no table."""
    if str in options(annotation):
        return None
    return next((o for o in options(annotation) if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def _items(annotation: Any) -> Any:
    """The value type of a mapping, None for anything else."""
    for option in options(annotation):
        origin = typing.get_origin(option)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return typing.get_args(option)[1]
    return None


def _default(section: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(section) if f.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
