"""Llama, Qwen2 and Qwen3 dense: q, k, v and gate, up fused along their rows, everything else under its own name.

Read in SGLang 0.5.23 (`models/llama.py`, `qwen2.py`, `qwen3.py`, `layers/linear.py`, `vocab_parallel_embedding.py`):
column-parallel layers keep rows of the matrix, row-parallel ones keep columns, embeddings are padded with zero rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ShardError  # noqa: TID252  (vendored by copying the folder: no absolute imports)

ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

_VOCAB_PADDING = 64

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
    split: Literal["rows", "kv_rows", "columns", "vocab", "none"]
    """What tensor parallelism divides."""


def locate(name: str) -> Placement | None:
    """Find a checkpoint tensor's place; None for tensors that the engine ignores (rotary tables)."""
    if "rotary_emb." in name:
        return None
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    for part, (fused, index, count) in _FUSED.items():
        if f".{part}." in name:
            split = "kv_rows" if part in ("k_proj", "v_proj") else "rows"
            return Placement(name.replace(part, fused), index, count, split)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return Placement(name, 0, 1, "columns")
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Placement(name, 0, 1, "vocab")
    return Placement(name, 0, 1, "none")


def local_shape(shape: tuple[int, ...], placement: Placement, *, tp: int, num_kv_heads: int | None) -> tuple[int, ...]:
    """Shape of the block that every tensor-parallel rank of the engine holds, padding included."""
    match placement.split:
        case "none":
            return shape
        case "columns":
            return shape[0], _divided(shape[1], tp)
        case "rows":
            return _divided(shape[0], tp), *shape[1:]
        case "kv_rows":
            return _divided(shape[0], min(tp, num_kv_heads or tp)), *shape[1:]
        case "vocab":
            return _padded_vocab(shape[0], tp) // tp, *shape[1:]


def local_block(
    whole: torch.Tensor, placement: Placement, *, tp: int, rank: int, num_kv_heads: int | None
) -> torch.Tensor:
    """The block of a whole tensor that one tensor-parallel rank of the engine holds, padding included."""
    if placement.split == "none":
        return whole
    size = local_shape(tuple(whole.shape), placement, tp=tp, num_kv_heads=num_kv_heads)
    if placement.split == "columns":
        return whole[:, rank * size[1] : (rank + 1) * size[1]]
    if placement.split == "kv_rows":  # several ranks share a head when there are fewer heads than ranks
        rank = rank * (whole.shape[0] // size[0]) // tp
    block = whole[rank * size[0] : (rank + 1) * size[0]]
    if block.shape[0] == size[0]:
        return block
    return torch.cat([block, block.new_zeros(size[0] - block.shape[0], *size[1:])])


def _divided(size: int, parts: int) -> int:
    if size % parts:
        raise ShardError(f"A dimension of {size} cannot be divided among {parts} ranks of an engine.")
    return size // parts


def _padded_vocab(size: int, tp: int) -> int:
    multiple = _VOCAB_PADDING
    if -(-size // multiple) * multiple % tp:
        multiple *= tp
    return -(-size // multiple) * multiple
