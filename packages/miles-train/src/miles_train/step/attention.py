"""Causal attention over rows packed one after another, for any model that hands its queries, keys and values out.

Everything outside attention works on the distinct tokens [U, …] and never sees padding (see `rows`). Attention itself
gathers whole rows: into a variable-length kernel where there is one (16-bit on a GPU), else into buckets of rows of
like length, padded right of the real tokens, where causal attention cannot look.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .rows import PackedRows


def attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, *, scaling: float | None, window: int | None) -> Tensor:
    """[U, heads, D] queries (fewer key and value heads) -> [U, heads, D].

    Args:
        window: tokens that a query may look at, itself among them; None for all before it.
    """
    if window is not None and window >= packed.max_length:
        window = None
    kernel = varlen if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else bucketed
    return kernel(q, k, v, packed, scaling=scaling, window=window)


def varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, *, scaling: float | None, window: int | None) -> Tensor:
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


def bucketed(
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
