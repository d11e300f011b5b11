"""Which tensors are quantised, and how: the same matcher for checkpoint, training, weight updates and checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import QuantError
from .fp8 import Fp8Format

ALWAYS_KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "router")
"""Substrings of HF names that stay in their type: norms, embeddings, head and router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One format for every linear weight, except what is kept."""

    format: Fp8Format
    keep: tuple[str, ...] = ()
    """Further substrings of HF names that stay in their type."""
    keep_first_layers: int = 0
    keep_last_layers: int = 0
    num_layers: int | None = None
    """Needed when last layers are kept."""

    def __post_init__(self) -> None:
        if self.keep_first_layers < 0 or self.keep_last_layers < 0:
            raise QuantError("`keep_first_layers` and `keep_last_layers` count layers; they cannot be negative.")
        if self.keep_last_layers and self.num_layers is None:
            raise QuantError("`keep_last_layers` needs `num_layers`, the number of layers of the model.")

    def quantizes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor `name` (HF) of `shape` is quantised."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return False
        if any(part in name for part in (*ALWAYS_KEPT, *self.keep)):
            return False
        layer = layer_index(name)
        if layer is None:
            return True
        last = (self.num_layers or 0) - self.keep_last_layers
        return layer >= self.keep_first_layers and (not self.keep_last_layers or layer < last)

    def quantization_config(self, names: Sequence[str] = ()) -> dict[str, object]:
        """The HF `quantization_config` of a checkpoint made with this recipe.

        Args:
            names: module names that stay in their type, listed for the loader.
        """
        config: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in names),
        }
        if self.format.block is not None:
            config["weight_block_size"] = list(self.format.block)
        return config


def layer_index(name: str) -> int | None:
    """The layer that an HF name belongs to: `model.layers.7.mlp.up_proj.weight` -> 7."""
    parts = name.split(".")
    for part, following in itertools.pairwise(parts):
        if part == "layers" and following.isdigit():
            return int(following)
    return None
