"""The user's own code in a configuration: `"package.module:attribute"` with arguments, one mechanism for all.

advantage = "grpo"                                                    built in
advantage = "my_package.rl:centred"                                   the user's own
advantage = { name = "my_package.rl:scaled", args = { scale = 2.0 } }     with arguments
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from .settings import SettingError

F = TypeVar("F", bound=Callable[..., Any])


class ImportStringError(SettingError):
    """An import string does not lead to an object, or not to one that can be called as it is going to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A callable that a configuration names, and keyword arguments that it is called with beside its usual ones."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core)

    name: str
    """A built-in name, or an import string."""
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments."""


def load(target: str, *, what: str) -> Any:
    """The object that an import string names.

    Args:
        target: `"module:attribute"`, attribute may be dotted.
        what: which setting holds the string, for the error.

    Raises:
        ImportStringError: malformed, no such module, or no such attribute (with the nearest names). An error
            raised *by* the module while it is imported is passed on as it is.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise ImportStringError(f'`{what}` is {target!r}; write it as "package.module:attribute".')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module exists, one that it imports does not
        raise ImportStringError(
            f"`{what}` is {target!r} but there is no module {error.name!r}.{_near(error.name, _siblings(error.name))} "
            "Modules are looked for beside the config file, in the current directory and among the installed packages."
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = _near(part, [name for name in dir(found) if not name.startswith("_")])
            raise ImportStringError(f"`{what}` is {target!r} but {module_name} has no {part!r}.{near}")
        found = getattr(found, part)
    return found


def call(target: str, *positional: Any, keywords: Mapping[str, Any], what: str) -> Any:
    """What the callable that `target` names returns.

    Raises:
        ImportStringError: as `load`, or the object cannot be called like this. An error raised *by* the callable is
            passed on as it is.
    """
    found = load(target, what=what)
    check_call(found, len(positional), keywords, what=what, target=target)
    return found(*positional, **keywords)


def check_call(found: Any, positional: int, keywords: Mapping[str, Any], *, what: str, target: str) -> None:
    """Whether `found` can be called with so many positional arguments and these keywords; calls nothing.

    Raises:
        ImportStringError: it cannot; the message holds its signature.
    """
    if not callable(found):
        raise ImportStringError(f"`{what}` is {target!r}, a {type(found).__name__} that cannot be called.")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*[None] * positional, **keywords)
    except TypeError as error:
        raise ImportStringError(
            f"`{what}` is {target!r} and takes {signature}, which {positional} positional arguments and the keyword "
            f"arguments {dict(keywords)} do not fit: {error}.{_unknown(signature, keywords)}"
        ) from error


def name_of(choice: str | Plugin) -> str:
    """The built-in name or the import string, without the arguments."""
    return choice if isinstance(choice, str) else choice.name


def resolve(
    choice: str | Plugin | F,
    table: Mapping[str, F],
    *,
    kind: str,
    positional: int | None = None,
    keywords: Sequence[str] = (),
) -> F:
    """The callable that a setting chooses, its arguments bound.

    Args:
        choice: a name in `table`, an import string, either with arguments, or the callable itself.
        table: the built-in callables by name.
        kind: what is looked up, for the error.
        positional: how many positional arguments it is going to be called with; None leaves the call unchecked.
        keywords: names of the keyword arguments that it is going to be called with besides those of the setting.

    Raises:
        SettingError: no built-in callable has the name.
        ImportStringError: as `load`, or it does not take the arguments.
    """
    if not isinstance(choice, str | Plugin):
        return choice
    check_name(choice, table, kind=kind)
    name = name_of(choice)
    given: Mapping[str, Any] = {} if isinstance(choice, str) else choice.args
    found = table[name] if name in table else load(name, what=kind)
    if taken := [key for key in given if key in keywords]:
        raise ImportStringError(f"`args` of the {kind} {name!r} sets {', '.join(taken)}, which every call passes.")
    if positional is not None:
        check_call(found, positional, {**dict.fromkeys(keywords), **given}, what=kind, target=name)
    return cast(F, partial(found, **given)) if given else cast(F, found)


def check_name(choice: str | Plugin, table: Mapping[str, object], *, kind: str, key: str | None = None) -> None:
    """Raise SettingError unless the name is built in or has the form of an import string; imports nothing.

    Args:
        key: the setting that holds the choice, for the error.
    """
    name = name_of(choice)
    if name in table or ":" in name:
        return
    said = f"`{key}` is {name!r}. " if key else ""
    raise SettingError(
        f"{said}No {kind} is called {name!r}.{_near(name, list(table))} Built in: {', '.join(sorted(table))}; "
        f"your own is an import string such as 'my_pkg.module:my_{kind.replace(' ', '_')}'."
    )


def _unknown(signature: inspect.Signature, keywords: Mapping[str, Any]) -> str:
    """A sentence for each keyword that the signature does not have."""
    known = list(signature.parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return ""
    return "".join(f" It has no argument {name!r}.{_near(name, known)}" for name in keywords if name not in known)


def _siblings(module: str) -> list[str]:
    """Names of the modules where `module` was looked for."""
    package, _, _ = module.rpartition(".")
    path = getattr(importlib.import_module(package), "__path__", []) if package else None
    prefix = package + "." if package else ""
    return [prefix + found.name for found in pkgutil.iter_modules(path)]


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {', '.join(near)}?" if near else ""
