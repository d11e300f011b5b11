"""One small file a family."""

from .base import Family
from .registry import ALIASES, FAMILIES

__all__ = ["ALIASES", "FAMILIES", "Family"]
