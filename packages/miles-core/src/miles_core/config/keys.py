"""The keys that a configuration has, read off its dataclasses: type, default and the docstring under each field.

Three shapes of a field are more than a value: a dataclass is a table, a mapping of dataclasses is a table for each name
that the user chooses, and a union of dataclasses is a table whose `kind` says which keys it has. A plug-in,
`str | Plugin`, is one key that takes text or a table.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

KeyPath = tuple[str, ...]
"""Where a key is: ("rollout", "sampling", "top_p")."""

FREE = object()
"""Stands for the type of a key inside a free table, such as `env.args`: anything goes."""

NAME = "NAME"
"""Stands for a name that the user chooses, such as that of an engine."""

KIND = "kind"
"""The key that tells the tables of a union apart."""

OWN_KIND = "module:function"
"""Stands for the kind of a table whose `kind` names the user's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting, as the reference lists it and `--explain` describes it."""

    path: KeyPath
    type: Any
    default: Any
    """`dataclasses.MISSING` where the table cannot do without it."""
    doc: str
    """The docstring under the field, as one paragraph."""
    kinds: tuple[str, ...] = ()
    """The kinds that have this key, where the table has several; empty where all have it."""

    def __str__(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionTable:
    """A table whose `kind` says which dataclass it is, such as `[train.loss]`; the loader chooses by it."""

    path: KeyPath
    kinds: Mapping[str, type]
    """By kind; OWN_KIND for that of the user's own code, which refuses a `kind` without a colon."""
    default: str

    def chosen(self, kind: object) -> type | None:
        """The dataclass of that kind, None where there is no such kind."""
        return self.kinds.get(kind_name(kind))

    def owners(self, name: str) -> list[str]:
        """The kinds that have a key called `name`."""
        return [f'"{kind}"' for kind, table in self.kinds.items() if name in fields(table)]


def leaves(section: type, path: KeyPath = ()) -> Iterator[Key]:
    """Every leaf below `section`, in the order written."""
    docs = field_docs(section)
    for name, annotation in fields(section).items():
        here: KeyPath = (*path, name)
        tables = tables_of(annotation)
        named: tuple[type, ...] = () if is_list(annotation) else tables_of(item_type(annotation))
        if named:
            yield from leaves(named[0], (*here, NAME))
        elif not tables or is_plugin(annotation):
            yield Key(path=here, type=annotation, default=_default(section, name), doc=docs.get(name, ""))
        elif len(tables) > 1:
            yield from _leaves_of_kinds(_union(section, name, here))
        else:
            for table in tables:
                yield from leaves(table, here)


def unions(section: type, path: KeyPath = ()) -> Iterator[UnionTable]:
    """Every table below `section` that has several kinds."""
    for name, annotation in fields(section).items():
        tables = tables_of(annotation)
        if is_plugin(annotation):
            continue
        if len(tables) > 1:
            yield _union(section, name, (*path, name))
        else:
            for table in tables:
                yield from unions(table, (*path, name))


def type_at(section: type, path: Sequence[str]) -> Any:
    """The type of the key at `path`, FREE inside a free table, None where there is no such key.

    In a table of several kinds a key has the types that it has in any of them.
    """
    annotation: Any = section
    for name in path:
        tables, item = tables_of(annotation), item_type(annotation)
        if tables:
            found = tuple(fields(table)[name] for table in tables if name in fields(table))
            annotation = Union[found] if found else None  # noqa: UP007  (of as many as there are)
        elif item is not None and not is_list(annotation):
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
    return list(dict.fromkeys(name for table in tables_of(type_at(section, path)) for name in fields(table)))


@functools.cache
def fields(section: type) -> dict[str, Any]:
    """The type of each field."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """The docstring under each field, as one paragraph; those of a base class too."""
    docs: dict[str, str] = {}
    for table in reversed([base for base in section.__mro__ if dataclasses.is_dataclass(base)]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0]
        assert isinstance(tree, ast.ClassDef)
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


def tables_of(annotation: Any) -> tuple[type, ...]:
    """The dataclasses that a value of this type may be."""
    return tuple(o for o in options(annotation) if isinstance(o, type) and dataclasses.is_dataclass(o))


def is_plugin(annotation: Any) -> bool:
    """Whether a value is text or a table."""
    return str in options(annotation) and bool(tables_of(annotation))


def is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def item_type(annotation: Any) -> Any:
    """The type of a mapping's values or of a list's items, None for anything else."""
    for option in options(annotation):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return arguments[1]
        if origin is tuple and arguments[1:] == (Ellipsis,):
            return arguments[0]
    return None


def kind_name(kind: object) -> str:
    """What the value of a key `kind` is called among the kinds of a union."""
    return OWN_KIND if ":" in str(kind) else str(kind)


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
    if dataclasses.is_dataclass(annotation):
        return f"{{{', '.join(fields(typing.cast(type, annotation)))}}}"
    if is_list(annotation) and item_type(annotation) is not None:
        item = type_name(arguments[0])
        return f"list of ({item})" if " | " in item else f"list of {item}"
    if is_list(annotation):
        return f"list of {len(arguments)}: {', '.join(_single_name(a) for a in arguments)}"
    return "table" if item_type(annotation) is not None else "anything"


def _union(section: type, name: str, path: KeyPath) -> UnionTable:
    kinds = {_kind(table): table for table in tables_of(fields(section)[name])}
    return UnionTable(path=path, kinds=kinds, default=_kind(type(_default(section, name))))


def _kind(table: type) -> str:
    choices = typing.get_args(fields(table)[KIND])
    return choices[0] if choices else OWN_KIND


def _leaves_of_kinds(union: UnionTable) -> Iterator[Key]:
    """`kind` first, with what each is; then every key once, where kinds agree about it."""
    keys = [(kind, key) for kind, table in union.kinds.items() for key in leaves(table, union.path)]
    common = [name for name in fields(union.kinds[union.default]) if len(union.owners(name)) == len(union.kinds)]
    docs: list[str] = []
    for kind, table in union.kinds.items():
        own = [name for name in fields(table) if name not in common]
        docs.append(f"`{kind}`: {inspect.cleandoc(table.__doc__ or '').splitlines()[0]}")
        docs += [f"Its own keys: {', '.join(own)}."] if own else []
    kind_type = Union[tuple(fields(table)[KIND] for table in union.kinds.values())]  # noqa: UP007
    yield Key(path=(*union.path, KIND), type=kind_type, default=union.default, doc=" ".join(docs))
    same: dict[tuple[object, ...], tuple[Key, list[str]]] = {}
    for kind, key in keys:
        said = (key.path, type_name(key.type), repr(key.default), key.doc)
        same.setdefault(said, (key, []))[1].append(kind)
    for key, kinds in same.values():
        if key.path != (*union.path, KIND):
            yield replace(key, kinds=() if len(kinds) == len(union.kinds) else tuple(kinds))


def _default(section: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(section) if f.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
