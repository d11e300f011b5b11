"""How model families write an assistant turn. A new one is a `Family` in one of these files, and in its `FAMILIES`."""

from . import catalog, channels, deepseek
from .base import Family

FAMILIES: dict[str, Family] = {
    family.name: family for module in (catalog, channels, deepseek) for family in module.FAMILIES
}
ALIASES = {alias: family.name for family in FAMILIES.values() for alias in family.aliases}

__all__ = ["ALIASES", "FAMILIES", "Family"]
