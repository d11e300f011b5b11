"""Llama, Qwen2 and Qwen3 dense: q, k, v and gate, up fused along their rows, everything else under its own name.

Read in SGLang 0.5.23 (`models/llama.py`, `qwen2.py`, `qwen3.py`, `layers/linear.py`, `vocab_parallel_embedding.py`):
column-parallel layers keep rows of the matrix, row-parallel ones keep columns, embeddings are padded with zero rows.
On a CPU the MLP is padded too (`configs/update_config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ShardError

ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

_VOCAB_PADDING = 64
_CPU_MLP_PADDING = 32
"""The intermediate size of each rank is a multiple of this on a CPU."""

_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a checkpoint tensor lies in the engine."""

    param: str
    """SGLang's parameter name."""
    index: int
    """Position among the parts of a fused parameter, stacked along rows."""
    count: int
    """Number of parts; 1 when not fused."""
    split: Literal["q_rows", "kv_rows", "mlp_rows", "columns", "mlp_columns", "vocab", "none"]
    """What tensor parallelism divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How an engine divides a model among its ranks."""

    tp: int
    num_kv_heads: int | None
    on_gpu: bool

    @property
    def is_plain(self) -> bool:
        """Whether heads fall on ranks evenly; on a CPU, SGLang pads heads otherwise, which is not modelled here."""
        return self.tp == 1 or self.on_gpu or (self.num_kv_heads is not None and self.num_kv_heads % self.tp == 0)


def locate(name: str) -> Placement | None:
    """Find a checkpoint tensor's place; None for tensors that the engine ignores (rotary tables)."""
    if "rotary_emb." in name:
        return None
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    for part, (fused, index, count) in _FUSED.items():
        if f".{part}." in name:
            split = "q_rows" if part == "q_proj" else "kv_rows" if fused == "qkv_proj" else "mlp_rows"
            return Placement(name.replace(part, fused), index, count, split)
    if name.endswith(".o_proj.weight"):
        return Placement(name, 0, 1, "columns")
    if name.endswith(".down_proj.weight"):
        return Placement(name, 0, 1, "mlp_columns")
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Placement(name, 0, 1, "vocab")
    return Placement(name, 0, 1, "none")


def local_shape(shape: tuple[int, ...], placement: Placement, division: Division) -> tuple[int, ...]:
    """Shape of the block that every tensor-parallel rank of the engine holds, padding included."""
    tp = division.tp
    mlp_multiple = tp if division.on_gpu else tp * _CPU_MLP_PADDING
    match placement.split:
        case "none":
            return shape
        case "q_rows":
            return _divided(shape[0], tp), *shape[1:]
        case "kv_rows":
            return _divided(shape[0], min(tp, division.num_kv_heads or tp)), *shape[1:]
        case "mlp_rows":
            return _padded(shape[0], mlp_multiple) // tp, *shape[1:]
        case "columns":
            return shape[0], _divided(shape[1], tp)
        case "mlp_columns":
            return shape[0], _padded(shape[1], mlp_multiple) // tp
        case "vocab":
            padded = _padded(shape[0], _VOCAB_PADDING)
            return (padded if padded % tp == 0 else _padded(shape[0], _VOCAB_PADDING * tp)) // tp, *shape[1:]


def local_block(whole: torch.Tensor, placement: Placement, division: Division, *, rank: int) -> torch.Tensor:
    """The block of a whole tensor that one tensor-parallel rank of the engine holds, padded with zeros."""
    if placement.split == "none":
        return whole
    dim = 1 if placement.split in ("columns", "mlp_columns") else 0
    size = local_shape(tuple(whole.shape), placement, division)[dim]
    if placement.split == "kv_rows":  # several ranks share a head when there are fewer heads than ranks
        rank = rank * (whole.shape[0] // size) // division.tp
    start = min(rank * size, whole.shape[dim])
    block = whole.narrow(dim, start, min(size, whole.shape[dim] - start))
    if block.shape[dim] == size:
        return block
    missing = list(block.shape)
    missing[dim] = size - block.shape[dim]
    return torch.cat([block, block.new_zeros(missing)], dim=dim)


def _divided(size: int, parts: int) -> int:
    if size % parts:
        raise ShardError(f"A dimension of {size} cannot be divided among {parts} ranks of an engine.")
    return size // parts


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
