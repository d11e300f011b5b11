"""Import strings: `"package.module:attribute"` names any callable of the user's, one mechanism for every plug-in."""

from __future__ import annotations

import difflib
import importlib
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
    if not (module_name and colon and attribute):
        raise ImportStringError(f'`{what}` is {target!r}; write it as "package.module:attribute".')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module exists, one that it imports does not
        raise ImportStringError(
            f"`{what}` is {target!r} but there is no module {error.name!r}. Modules are looked for beside the "
            "config file, in the current directory and among the installed packages."
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise ImportStringError(f"`{what}` is {target!r} but {module_name} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found
