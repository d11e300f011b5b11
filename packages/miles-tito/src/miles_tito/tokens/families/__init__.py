"""One small file a family."""

from .base import Family
from .registry import FAMILIES, choose_family

__all__ = ["FAMILIES", "Family", "choose_family"]
