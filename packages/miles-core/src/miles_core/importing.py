"""Import strings: `"package.module:attribute"` names any callable of the user's, one mechanism for every plug-in."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from miles_tito.errors import MilesError


class ImportStringError(MilesError, ValueError):
    """An import string does not lead to an object."""


def load(target: str, *, what: str) -> Any:
    """The object that `target` names.

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
    if not callable(found):
        raise ImportStringError(f"`{what}` is {target!r}, a {type(found).__name__} that cannot be called.")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some builtins have none
        return found(*positional, **keywords)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise ImportStringError(
            f"`{what}` is {target!r} and takes {signature}, which the arguments {dict(keywords)} do not fit: {error}."
        ) from error
    return found(*positional, **keywords)


def _siblings(module: str) -> list[str]:
    """Names of the modules where `module` was looked for."""
    package, _, _ = module.rpartition(".")
    path = getattr(importlib.import_module(package), "__path__", []) if package else None
    prefix = package + "." if package else ""
    return [prefix + found.name for found in pkgutil.iter_modules(path)]


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {', '.join(near)}?" if near else ""
