"""How model families write an assistant turn. A new one is a `Family` in one of these files, and in its `FAMILIES`."""

from .base import Family
from .registry import ALIASES, FAMILIES

__all__ = ["ALIASES", "FAMILIES", "Family"]
