"""Whether a delta pays: `choose` makes it, or says why the full weights are better."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .blob import Codec
from .classes import expected_bits, sample
from .codec import encode

APPLY_BYTES_PER_S = 5e9
"""Assumed of the receiver, in bytes of the full array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to send of one array, and why."""

    kind: Literal["full", "delta"]
    nbytes: int
    """Bytes to send."""
    full_bytes: int
    reason: str
    encode_s: float = 0.0
    """Spent on the delta, whether it is sent or not."""
    blob: bytes | None = field(default=None, repr=False)
    """The delta; None where the full array is to be sent."""


def choose(
    old: np.ndarray | None,
    new: np.ndarray,
    *,
    codec: Codec = "fast",
    max_ratio: float = 0.5,
    link_bytes_per_s: float | None = None,
) -> Choice:
    """The delta from `old` to `new` where it pays, else the full array.

    Args:
        old: what the receiver holds; None where it holds nothing, or something else.
        new: contiguous 1-D bit patterns, see `encode`.
        max_ratio: a delta with more than this share of the full bytes is not worth its work.
        link_bytes_per_s: what the link to the receiver carries; with it, a delta that would arrive later than the
            full array is not sent. None: bytes alone decide.
    """
    if old is None:
        return _full(new, "the receiver holds no base")
    if old.dtype != new.dtype or old.size != new.size:
        return _full(new, f"the base has {old.size} {old.dtype} and the new version {new.size} {new.dtype}")
    if new.size == 0:
        return _full(new, "there is nothing to send")
    before, after = sample(old, new)
    expected = expected_bits(before, after) / 8 * (new.size / before.size)
    if expected > max_ratio * new.nbytes:
        share, limit = np.count_nonzero(before != after) / before.size, f"over {max_ratio:g} of the full size"
        return _full(new, f"{share:.1%} of a sample change: a delta of about {expected:.0f} bytes, {limit}")
    start = time.perf_counter()
    blob = encode(old, new, codec=codec)
    seconds = time.perf_counter() - start
    if len(blob) > max_ratio * new.nbytes:
        return _full(new, f"the delta has {len(blob)} bytes, over {max_ratio:g} of the full size", seconds)
    if link_bytes_per_s is not None:
        full_s = new.nbytes / link_bytes_per_s
        delta_s = seconds + len(blob) / link_bytes_per_s + new.nbytes / APPLY_BYTES_PER_S
        if delta_s > full_s:
            times = f"{delta_s:.3g} s ({seconds:.3g} s of it to encode), the full array {full_s:.3g} s"
            return _full(new, f"the delta takes {times}", seconds)
    reason = f"the delta has {len(blob) / new.nbytes:.2%} of the full size"
    return Choice(kind="delta", nbytes=len(blob), full_bytes=new.nbytes, reason=reason, encode_s=seconds, blob=blob)


def _full(new: np.ndarray, reason: str, seconds: float = 0.0) -> Choice:
    return Choice(kind="full", nbytes=new.nbytes, full_bytes=new.nbytes, reason=reason, encode_s=seconds)
