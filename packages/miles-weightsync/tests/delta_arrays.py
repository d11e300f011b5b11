"""Pairs of arrays for the tests of deltas."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from miles_weightsync.native import library

DTYPES = (np.uint8, np.uint16, np.uint32)
ISAS = [isa for isa in ("avx512", "avx2", "portable") if library._table(isa) is not None]


def weights(count: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Bit patterns as the upper bits of normal float32 values: 2 bytes are bfloat16."""
    values = (rng.standard_normal(count) * 0.05).astype(np.float32).view(np.uint32)
    return (values >> (32 - 8 * np.dtype(dtype).itemsize)).astype(dtype)


def moved(old: np.ndarray, share: float, rng: np.random.Generator, *, far: bool = False) -> np.ndarray:
    """`old` with about this share of its values some steps up or down, small magnitudes more often."""
    top = old.dtype.type(1 << (8 * old.itemsize - 1))
    chance = np.where(old % top > np.median(old % top) if old.size else False, share / 2, share)
    new, picked = old.copy(), rng.random(old.size) < chance
    steps = rng.choice([1, -1, 1, -1, 2, -7, 8, 130, -300] if far else [1, -1], int(picked.sum()))
    new[picked] += steps.astype(np.int64).astype(old.dtype)
    return new


@st.composite
def pairs(draw: Any, max_size: int = 700) -> tuple[np.ndarray, np.ndarray]:
    """Old and new: any sizes around those of blocks, from nothing to everything changed, special values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(st.one_of(st.integers(0, max_size), st.sampled_from([63, 64, 65, 127, 128, 129])))
    old = weights(count, dtype, rng)
    match draw(st.sampled_from(["moved", "bits", "specials", "none", "last"])):
        case "moved":
            new = moved(old, draw(st.sampled_from([0.01, 0.3, 1.0])), rng, far=draw(st.booleans()))
        case "bits":
            new = rng.integers(0, 1 << (8 * old.itemsize), count, dtype=np.uint64).astype(dtype)
        case "specials":
            specials = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, 3e38], np.float32).view(np.uint32)
            cut = (specials >> (32 - 8 * old.itemsize)).astype(dtype)
            old, new = rng.choice(cut, count), rng.choice(cut, count)
        case "last":
            new = old.copy()
            new[-1:] ^= 1
        case _:
            new = old.copy()
    return old, new
