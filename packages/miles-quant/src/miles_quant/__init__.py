"""One bit-exact low-precision contract between trainer and engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, ModelFolderError, QuantError
from .recipe.hf import modelopt_config, quantization_config, recipe_of_config
from .recipe.recipe import Recipe

if TYPE_CHECKING:
    from .checkpoints.compare import ComparedTensor, compare
    from .checkpoints.convert import convert
    from .checkpoints.dequantize import dequantize
    from .checkpoints.job import FolderReport
    from .checkpoints.serving import write_serving
    from .export.digest import Digest, differing, with_digests
    from .export.shards import PackedShard, check_boxes, largest_over_ranks, quantize_shards, round_shards
    from .formats.registry import get_format
    from .formats.spec import Format, QuantizedTensor
    from .formats.swizzle import swizzle_scales, unswizzle_scales
    from .nn.linear import QuantLinear
    from .nn.packed import PackedLinear, load_packed
    from .nn.prepare import prepare_model
    from .verify import GoldenRow, verify_golden

__all__ = [
    "CheckpointError",
    "ComparedTensor",
    "Digest",
    "FolderReport",
    "Format",
    "GoldenRow",
    "ModelFolderError",
    "PackedLinear",
    "PackedShard",
    "QuantError",
    "QuantLinear",
    "QuantizedTensor",
    "Recipe",
    "check_boxes",
    "compare",
    "convert",
    "dequantize",
    "differing",
    "get_format",
    "largest_over_ranks",
    "load_packed",
    "modelopt_config",
    "prepare_model",
    "quantization_config",
    "quantize_shards",
    "recipe_of_config",
    "round_shards",
    "swizzle_scales",
    "unswizzle_scales",
    "verify_golden",
    "with_digests",
    "write_serving",
]

_NAMES = {
    "checkpoints.compare": ("ComparedTensor", "compare"),
    "checkpoints.convert": ("convert",),
    "checkpoints.dequantize": ("dequantize",),
    "checkpoints.job": ("FolderReport",),
    "checkpoints.serving": ("write_serving",),
    "export.digest": ("Digest", "differing", "with_digests"),
    "export.shards": ("PackedShard", "check_boxes", "largest_over_ranks", "quantize_shards", "round_shards"),
    "formats.registry": ("get_format",),
    "formats.spec": ("Format", "QuantizedTensor"),
    "formats.swizzle": ("swizzle_scales", "unswizzle_scales"),
    "nn.linear": ("QuantLinear",),
    "nn.packed": ("PackedLinear", "load_packed"),
    "nn.prepare": ("prepare_model",),
    "verify": ("GoldenRow", "verify_golden"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: only when a name that needs it is asked for
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
