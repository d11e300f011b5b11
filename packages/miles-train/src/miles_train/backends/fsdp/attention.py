"""Causal attention over rows packed one after another, registered with Transformers under one name.

Everything outside attention works on the distinct tokens [1, U, …] and never sees padding (see `rows`). Attention
itself gathers whole rows: into a variable-length kernel where there is one (16-bit on a GPU), else into buckets of
rows of like length, padded right of the real tokens, where causal attention cannot look.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from miles_train.errors import UnsupportedModel
from miles_train.step.rows import PackedRows

ATTENTION_NAME = "miles_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: [1, heads, U, D] queries (fewer key and value heads) -> [1, U, heads, D]."""
    _refuse(module, packed, {name: kwargs.get(name) for name in ("softcap", "s_aux", "position_bias")})
    assert packed is not None, "refused above"
    assert dropout == 0.0, "dropout is turned off when a model is loaded"
    window = sliding_window if sliding_window is not None and sliding_window < packed.max_length else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _varlen(q, k, v, packed, scaling=scaling, window=window)
    else:
        out = _bucketed(q, k, v, packed, scaling=scaling, window=window)
    return out[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, *, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = packed.cu_seqlens, packed.max_length
    out = varlen_attn(
        q.index_select(0, packed.expand),
        k.index_select(0, packed.expand),
        v.index_select(0, packed.expand),
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor), "no auxiliary output was asked for"
    return out.index_select(0, packed.collapse)


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, *, scaling: float | None, window: int | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    outs: list[Tensor] = []
    for places in packed.buckets:
        rows, longest = places.shape
        flat = places.reshape(-1)
        qb, kb, vb = (x.index_select(0, flat).view(rows, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = _window_mask(longest, window, q.device) if window is not None else None
        out = scaled_dot_product_attention(
            qb, kb, vb, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).reshape(rows * longest, *out.shape[1::2]))
    return torch.cat(outs).index_select(0, packed.from_buckets)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] True where a query may look: at itself and the window - 1 tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _refuse(module: nn.Module, packed: PackedRows | None, extras: dict[str, object]) -> None:
    if packed is None:
        raise UnsupportedModel(
            f'{type(module).__name__} does not hand its arguments on to attention; train it with layout = "padded".'
        )
    present = sorted(name for name, value in extras.items() if value is not None)
    if present:
        raise UnsupportedModel(
            f"{type(module).__name__} uses {', '.join(present)}, which packed attention does not compute; "
            'train it with layout = "padded".'
        )


@cache
def register() -> str:
    """Make the function known to Transformers; returns its name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    return ATTENTION_NAME
