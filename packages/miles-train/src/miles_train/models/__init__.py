"""Models small enough to learn on two CPU cores. Nothing heavy is imported before one is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .smollm2 import fetch_smollm2
    from .tiny import build_tiny

__all__ = ["build_tiny", "fetch_smollm2"]

_HOMES = {"build_tiny": ".tiny", "fetch_smollm2": ".smollm2"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
