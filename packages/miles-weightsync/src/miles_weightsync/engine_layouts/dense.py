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


def local_block(
    whole: torch.Tensor, placement: Placement, *, tp: int, rank: int, num_kv_heads: int | None
) -> torch.Tensor:
    """The block of a whole tensor that one tensor-parallel rank of the engine holds, padding included."""
    match placement.split:
        case "none":
            return whole
        case "columns":
            return whole.chunk(tp, dim=1)[rank].contiguous() if tp > 1 else whole
        case "rows":
            return _rows(whole, parts=tp, index=rank)
        case "kv_rows":
            if num_kv_heads is not None and num_kv_heads < tp:  # several ranks share a head
                return _rows(whole, parts=num_kv_heads, index=rank * num_kv_heads // tp)
            return _rows(whole, parts=tp, index=rank)
        case "vocab":
            return _vocab_rows(whole, tp=tp, rank=rank)


def _rows(whole: torch.Tensor, *, parts: int, index: int) -> torch.Tensor:
    if whole.shape[0] % parts:
        raise ShardError(f"A parameter of {whole.shape[0]} rows cannot be divided among {parts} ranks of an engine.")
    size = whole.shape[0] // parts
    return whole[index * size : (index + 1) * size]


def _vocab_rows(whole: torch.Tensor, *, tp: int, rank: int) -> torch.Tensor:
    multiple = _VOCAB_PADDING
    if _padded(whole.shape[0], multiple) % tp:
        multiple *= tp
    size = _padded(whole.shape[0], multiple) // tp
    own = whole[rank * size : (rank + 1) * size]
    if own.shape[0] == size:
        return own
    return torch.cat([own, own.new_zeros(size - own.shape[0], *own.shape[1:])])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
