"""Families by name."""

from __future__ import annotations

from . import chatml, deepseek, harmony_inkling, others
from .base import Family

_MODULES = (chatml, deepseek, harmony_inkling, others)
FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}
ALIASES = {alias: family.name for family in FAMILIES.values() for alias in family.aliases}
