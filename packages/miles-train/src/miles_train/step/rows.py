"""Rows as the model sees them: every common prefix once, and the map back to whole rows for attention.

Siblings of a group share their prompt, and the turns of a conversation their history. A token's hidden state depends
on the tokens before it alone, so a prefix that several rows begin with is computed once:

    rows      A B C d e      A B C f        N = 9 tokens
    distinct  A B C d e f                   U = 6 go through the linear layers
    attention gathers whole rows again; gradients of the shared tokens add up by themselves

Subscripts: N tokens of all rows, U distinct ones, R rows, B rows of a bucket, L its longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

MIN_FILL = 0.75
"""A bucket takes rows at least this fraction of its longest row…"""
MIN_BUCKET_TOKENS = 512
"""…or any row while it is this small: below, a kernel launch costs more than padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Where the rows of a micro-batch lie among its distinct tokens; attention reads it to see whole rows again."""

    places: np.ndarray
    """[N] int64, distinct token of each row token."""
    distinct: np.ndarray
    """[U] int64, a row token of each distinct token."""
    max_length: int
    cu_seqlens: Tensor
    """[R + 1] int32, where rows begin among the N tokens."""
    expand: Tensor
    """[N] int64, `places` on the device."""
    collapse: Tensor
    """[U] int64, `distinct` on the device."""
    buckets: tuple[Tensor, ...]
    """[B, L] int64 distinct token of each token of each row; padding repeats the row's last one."""
    from_buckets: Tensor
    """[U] int64, place of each distinct token in the flattened buckets."""


def packed_rows(tokens: np.ndarray, cu_seqlens: np.ndarray, device: torch.device) -> PackedRows:
    """Find common prefixes, and group rows into buckets of like length."""
    places, num_distinct = _share_prefixes(tokens, cu_seqlens)
    distinct = np.empty(num_distinct, dtype=np.int64)
    distinct[places] = np.arange(len(tokens))
    buckets, from_buckets = _fill_buckets(places, num_distinct, cu_seqlens)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        places=places,
        distinct=distinct,
        max_length=int(np.diff(cu_seqlens).max()),
        cu_seqlens=tensor(cu_seqlens),
        expand=tensor(places),
        collapse=tensor(distinct),
        buckets=tuple(tensor(bucket) for bucket in buckets),
        from_buckets=tensor(from_buckets),
    )


def _share_prefixes(tokens: np.ndarray, cu_seqlens: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the nodes of the prefix tree of all rows.

    In sorted order the longest prefix that a row shares with any earlier row is the one it shares with the row before.
    """
    rows = [tokens[start:stop] for start, stop in pairwise(cu_seqlens)]
    places = np.empty(len(tokens), dtype=np.int64)
    used = 0
    before: int | None = None
    for row in sorted(range(len(rows)), key=lambda row: (rows[row].tobytes(), row)):
        start, stop = cu_seqlens[row], cu_seqlens[row + 1]
        shared = 0 if before is None else _common(rows[before], rows[row])
        if before is not None:
            first = cu_seqlens[before]
            places[start : start + shared] = places[first : first + shared]
        new = stop - start - shared
        places[start + shared : stop] = np.arange(used, used + new)
        used += new
        before = row
    return places, int(used)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _fill_buckets(places: np.ndarray, num_distinct: int, cu_seqlens: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    lengths = np.diff(cu_seqlens)
    from_buckets = np.empty(num_distinct, dtype=np.int64)
    buckets: list[np.ndarray] = []
    start = 0
    for rows in _by_length(lengths):
        steps = np.arange(lengths[rows].max())
        bucket = places[cu_seqlens[rows, None] + np.minimum(steps, lengths[rows, None] - 1)]
        is_real = steps < lengths[rows, None]
        from_buckets[bucket[is_real]] = start + np.flatnonzero(is_real)
        start += bucket.size
        buckets.append(bucket)
    return buckets, from_buckets


def _by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Rows, longest first, cut where the next one would be mostly padding."""
    order = np.argsort(-lengths, kind="stable")
    cuts: list[int] = [0]
    tokens = 0
    for place, row in enumerate(order):
        longest = lengths[order[cuts[-1]]]
        if tokens >= MIN_BUCKET_TOKENS and lengths[row] < MIN_FILL * longest:
            cuts.append(place)
            tokens = 0
        tokens += int(lengths[row])
    return np.split(order, cuts[1:])
