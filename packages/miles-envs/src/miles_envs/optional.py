"""Optional dependencies: imported on first use, or refused with the command that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from miles_tito.errors import MissingDependency


def require(module: str, *, extra: str) -> Any:
    """The module, which comes with an extra of miles-envs. It stays untyped: none of them has type stubs.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(f"{module} is missing ({error}): pip install 'miles-envs[{extra}]'") from error
