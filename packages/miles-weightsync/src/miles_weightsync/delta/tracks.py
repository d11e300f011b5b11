"""A track: ascending positions with a step at each, as byte streams.

The gap to the position before is a byte below 254; 254 adds itself to what follows, 255 takes the whole gap from the
stream of 64-bit ones. In a *wide* track the low byte of the gap goes to a stream of its own first. A step (new - old,
wrapping) is a zigzag number: 0, -1, 1, -2, … → 0, 1, 2, 3, … Two steps share a byte, the first in its lower half; 15
takes the number from the bytes; 255 there takes the step itself from the escapes. Steps of one-byte elements always
fit a byte.

Huffman codes of pairs come closer to the entropy than those of single steps, most of which are -1 or 1.
"""

from __future__ import annotations

import numpy as np

from .blob import EXPONENT_SHIFT, Blob, Track
from .errors import DeltaError

MAX_CHAIN = 8
"""Bytes of 254 before a 64-bit gap is shorter."""
WIDE_FROM = 128
"""Mean gap from which the low byte is close to noise, and better kept apart."""


class TrackWriter:
    """Takes positions and steps piece by piece."""

    def __init__(self, *, is_wide: bool) -> None:
        self._is_wide = is_wide
        self._pieces: list[tuple[np.ndarray, ...]] = []
        self._next = 0
        self._changes = 0

    def append(self, positions: np.ndarray, steps: np.ndarray) -> None:
        """`positions` [n] uint64, ascending and beyond those before; `steps` [n], nonzero, in the type of elements."""
        if len(positions):
            self._pieces.append(pack(positions, steps, start=self._next, is_wide=self._is_wide))
            self._next = int(positions[-1]) + 1
            self._changes += len(positions)

    def finish(self, *, floor: int, elements: int) -> Track:
        whole = [np.concatenate(parts) for parts in zip(*self._pieces, strict=True)]
        gaps, lows, longs, halves, large, escapes = whole or [_NONE] * 6
        streams = (gaps, lows, longs, _pair(halves), large, escapes)
        return Track(floor=floor, elements=elements, changes=self._changes, is_wide=self._is_wide, streams=streams)


_NONE: np.ndarray = np.empty(0, np.uint8)
_BYTE, _ESCAPE = 15, 255


def pack(positions: np.ndarray, steps: np.ndarray, *, start: int, is_wide: bool) -> tuple[np.ndarray, ...]:
    """The six streams of [n] positions ≥ `start` and their steps, halves of bytes not yet in pairs."""
    gaps = positions.astype(np.uint64)
    gaps[1:] -= positions[:-1] + np.uint64(1)
    gaps[0] -= np.uint64(start)
    lows = gaps.astype(np.uint8) if is_wide else _NONE
    if is_wide:
        gaps >>= np.uint64(8)
    chain = gaps // np.uint64(254)
    is_long = chain > MAX_CHAIN
    chain[is_long] = 0
    ends = np.cumsum(chain + np.uint64(1), dtype=np.int64)
    out = np.full(int(ends[-1]), 254, np.uint8)
    out[ends - 1] = np.where(is_long, np.uint64(255), gaps % np.uint64(254)).astype(np.uint8)
    zigzag = to_zigzag(steps)
    halves = np.minimum(zigzag, _BYTE).astype(np.uint8)
    large = zigzag[zigzag >= _BYTE]
    escaped = zigzag >= _ESCAPE if steps.itemsize > 1 else np.zeros(steps.size, bool)
    large = np.minimum(large, _ESCAPE).astype(np.uint8)
    return out, lows, gaps[is_long].view(np.uint8), halves, large, steps[escaped].view(np.uint8)


def unpack(track: Track, dtype: np.dtype[np.unsignedinteger], *, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """[n] uint64 positions, ascending and below `limit`, and [n] steps in `dtype`.

    Raises:
        DeltaError: the streams do not fit together.
    """
    gaps, lows, longs, pairs, large, escapes = track.streams
    if track.changes == 0:
        _expect(gaps.size == 0, "gaps where nothing changes")
        return np.empty(0, np.uint64), np.empty(0, dtype)
    is_end, is_long = gaps != 254, gaps == 255
    wholes = np.frombuffer(longs.tobytes(), np.uint64)
    _expect(int(is_end.sum()) == track.changes and bool(is_end[-1]), "gaps that are not one for each change")
    _expect(int(is_long.sum()) == wholes.size, "other long gaps than it announces")
    _expect(bool(np.all(wholes < limit)), f"a gap beyond the {limit} elements")
    values = gaps.astype(np.uint64)
    values[is_long] = wholes
    sums = np.cumsum(values)[is_end]
    quotients = np.diff(sums, prepend=np.uint64(0))
    _expect(bool(np.all(quotients < limit)), f"a gap beyond the {limit} elements")
    if track.is_wide:
        quotients = (quotients << np.uint64(8)) | lows
    positions = np.cumsum(quotients + np.uint64(1)) - np.uint64(1)
    # No single gap exceeds 2^63, so a sum that wraps shows as a position that is not beyond the one before.
    ascending = bool(np.all(positions[1:] > positions[:-1]))
    _expect(ascending and bool(np.all(positions < limit)), f"more than {limit} elements")
    return positions, _steps(pairs, large, escapes, track.changes, dtype)


def _steps(
    pairs: np.ndarray, large: np.ndarray, escapes: np.ndarray, changes: int, dtype: np.dtype[np.unsignedinteger]
) -> np.ndarray:
    zigzag = np.stack([pairs & 15, pairs >> 4], axis=1).ravel()[:changes]
    is_large = zigzag == _BYTE
    _expect(int(is_large.sum()) == large.size, "other steps of a byte than it announces")
    zigzag[is_large] = large
    steps = from_zigzag(zigzag.astype(dtype))
    escaped = zigzag == _ESCAPE if dtype.itemsize > 1 else np.zeros(changes, bool)
    raw = np.frombuffer(escapes.tobytes(), dtype)
    _expect(int(escaped.sum()) == raw.size, "other steps of an element than it announces")
    steps[escaped] = raw
    return steps


def _pair(halves: np.ndarray) -> np.ndarray:
    padded = np.concatenate([halves, np.zeros(halves.size % 2, np.uint8)])
    return padded[::2] | padded[1::2] << 4


def to_zigzag(steps: np.ndarray) -> np.ndarray:
    """Small numbers for small steps of either sign."""
    signed = steps.view(f"i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def from_zigzag(zigzag: np.ndarray) -> np.ndarray:
    """The inverse of `to_zigzag`."""
    one = zigzag.dtype.type(1)
    return (zigzag >> one) ^ (~(zigzag & one) + one)


def is_wide(changes: int, elements: int) -> bool:
    """Whether a track with this share of changes is better wide."""
    return changes * WIDE_FROM < elements


def check_tracks(blob: Blob) -> None:
    """Floors ascend from 0, at borders of exponents; the tracks share out all elements; `fast` has one.

    Raises:
        DeltaError: they do not.
    """
    floors, border = [track.floor for track in blob.tracks], 1 << EXPONENT_SHIFT[blob.itemsize]
    top = 1 << (8 * blob.itemsize - 1)
    fits = bool(floors) and floors[0] == 0 and floors == sorted(set(floors)) and floors[-1] < top
    _expect(fits and all(floor % border == 0 for floor in floors), f"one of the floors {floors}")
    _expect(blob.codec == "small" or len(floors) == 1, f"{len(floors) - 1} others beside it in a `fast` delta")
    total = sum(track.elements for track in blob.tracks)
    _expect(total == blob.count, f"{total} elements together with the others, of {blob.count}")


def _expect(fact: bool, what: str) -> None:
    if not fact:
        raise DeltaError(f"The delta contradicts itself: a track has {what}.")
