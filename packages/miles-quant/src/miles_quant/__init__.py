"""One bit-exact low-precision contract between trainer and engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import QuantError
    from .export import PackedShard, quantize_shards
    from .fp8 import Fp8Format, QuantizedTensor
    from .recipe import Recipe

__all__ = ["Fp8Format", "PackedShard", "QuantError", "QuantizedTensor", "Recipe", "quantize_shards"]

_MODULES = {
    "Fp8Format": "fp8",
    "PackedShard": "export",
    "QuantError": "errors",
    "QuantizedTensor": "fp8",
    "Recipe": "recipe",
    "quantize_shards": "export",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: only when a name that needs it is asked for
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
