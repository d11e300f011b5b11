"""A plain callable by its short name, by import string, or as itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from operator import attrgetter
from typing import TypeVar

from .errors import RolloutConfigError

F = TypeVar("F", bound=Callable[..., object])


def resolve(choice: str | F, table: Mapping[str, F], *, kind: str) -> F:
    """The callable that `choice` names.

    Args:
        choice: a name in `table`, an import string `"my_pkg.module:function"`, or the callable itself.
        table: the built-in callables by name.
        kind: what is looked up, for the error.
    """
    if not isinstance(choice, str):
        return choice
    if choice in table:
        return table[choice]
    if ":" in choice:
        return _load(choice, kind=kind)
    raise unknown_name(choice, table, kind=kind)


def check_name(choice: str, table: Mapping[str, F], *, kind: str) -> None:
    """Raise unless `choice` is a built-in name or has the form of an import string; imports nothing."""
    if choice not in table and ":" not in choice:
        raise unknown_name(choice, table, kind=kind)


def unknown_name(choice: str, table: Mapping[str, F], *, kind: str) -> RolloutConfigError:
    close = get_close_matches(choice, table, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return RolloutConfigError(
        f"No {kind} is called {choice!r}. {hint}Built in: {', '.join(sorted(table))}; "
        f"your own is an import string such as 'my_pkg.module:my_{kind.replace(' ', '_')}'."
    )


def _load(choice: str, *, kind: str) -> F:  # pyright: ignore[reportInvalidTypeVarUse]  (an import cannot be typed)
    module, _, attribute = choice.partition(":")
    try:
        found = attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise RolloutConfigError(
            f"The {kind} {choice!r} cannot be imported: {type(error).__name__}: {error}. "
            "Write 'package.module:name' and make the package importable (PYTHONPATH or an editable install)."
        ) from error
    if not callable(found):
        raise RolloutConfigError(f"The {kind} {choice!r} is a {type(found).__name__}, not a callable.")
    return found  # pyright: ignore[reportReturnType]
