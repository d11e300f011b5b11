"""Deltas between two arrays of bit patterns: `encode`, `decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import compiled
from .blob import MAX_COUNT, Blob, Codec, Track, read_blob, write_blob
from .classes import ClassPlan, class_of, locate, plan_classes, sample, wrong_base
from .errors import DeltaError
from .tracks import TrackWriter, check_tracks, is_wide
from .tracks import unpack as unpack_in_numpy

_TYPES = ("|u1", "<u2", "<u4")
_CHUNK = 1 << 20
"""Elements compared at a time: bounds the memory that a delta of everything takes meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Which elements of an array change, and by how much."""

    count: int
    """Elements of the array."""
    positions: np.ndarray
    """[n] ascending; uint32, or uint64 where `count` is 2^32 or more."""
    diffs: np.ndarray
    """[n] new - old, wrapping, in the unsigned type of the elements; never 0."""
    witness: int | None = None
    """`witness` of the positions and the old values there; None where they are not known."""


def encode(old: np.ndarray, new: np.ndarray, *, codec: Codec = "fast") -> bytes:
    """A self-describing delta that turns `old` into `new`.

    Args:
        old: [N] uint8, uint16 or uint32, contiguous: bit patterns. Packed 4-bit codes are best taken as bytes.
        new: [N] of the same type.
        codec: `fast`, or `small`, which needs the old values again to be decoded.

    Raises:
        DeltaError: the arrays do not fit each other.
    """
    check_array(old, "old")
    check_array(new, "new")
    if old.dtype != new.dtype or old.size != new.size:
        raise DeltaError(f"A delta needs two arrays alike; old has {old.size} {old.dtype}, new {new.size} {new.dtype}.")
    sampled = sample(old, new)
    if codec == "small":
        plan = plan_classes(*sampled, count=old.size)
    elif codec == "fast":
        plan = ClassPlan((0,), (np.count_nonzero(sampled[0] != sampled[1]) / max(sampled[0].size, 1),))
    else:
        raise DeltaError(f"There is no codec {codec!r}; there are 'fast' and 'small'.")
    changes, tracks, seen = compiled.find(old, new, plan) or _find(old, new, plan)
    return write_blob(
        Blob(codec=codec, itemsize=old.itemsize, count=old.size, changes=changes, witness=seen, tracks=tracks)
    )


def encode_decoded(decoded: Decoded) -> bytes:
    """A `fast` delta of changes that are known already (a folded chain)."""
    check_types(decoded)
    check_positions(decoded)
    positions, diffs, count = decoded.positions, decoded.diffs, decoded.count
    track = compiled.pack(positions, diffs, count=count) or _pack(positions, diffs, count)
    return write_blob(
        Blob(
            codec="fast",
            itemsize=diffs.itemsize,
            count=count,
            changes=positions.size,
            witness=decoded.witness,
            tracks=(track,),
        )
    )


def check_types(decoded: Decoded) -> None:
    """Kernels can read its arrays."""
    positions, diffs = decoded.positions, decoded.diffs
    fits = positions.dtype.str in ("<u4", "<u8") and diffs.dtype.str in _TYPES
    if not fits or positions.ndim != 1 or positions.shape != diffs.shape:
        raise DeltaError(
            f"A delta has as many positions (uint32 or uint64) as steps (uint8, uint16 or uint32); this one has "
            f"{positions.dtype} {positions.shape} and {diffs.dtype} {diffs.shape}."
        )


def check_positions(decoded: Decoded) -> None:
    """Its positions ascend and lie among its elements."""
    positions = decoded.positions
    if positions.size and (positions[-1] >= decoded.count or not np.all(positions[1:] > positions[:-1])):
        raise DeltaError(f"The positions of a delta must ascend and lie below its {decoded.count} elements.")


def decode(blob: bytes | memoryview | np.ndarray, *, old: np.ndarray | None = None) -> Decoded:
    """The changes in `blob`. With `old`, it is also checked that they were made against these values.

    Raises:
        DeltaError: `blob` is damaged, or `old` is missing where the codec needs it, or is not what it was made against.
    """
    return decode_blob(read_blob(blob), old=old)


def decode_blob(blob: Blob, *, old: np.ndarray | None) -> Decoded:
    """`decode`, of a blob taken apart already."""
    dtype = element_type(blob)
    if old is not None:
        check_fits(blob, old)
    check_tracks(blob)
    parts = [_unpack(track, dtype) for track in blob.tracks]
    if blob.codec == "fast":
        positions, diffs = parts[0]
    else:
        if old is None:
            raise DeltaError("A `small` delta is decoded with the old values: pass `old`.")
        positions, diffs = compiled.locate(old, blob.tracks, parts) or _locate(old, blob.tracks, parts)
    positions = positions.astype(np.uint32 if blob.count < 1 << 32 else np.uint64)
    if old is not None and blob.witness is not None and witness(positions, old[positions]) != blob.witness:
        raise wrong_base(f"where its {positions.size} changes belong, other values stand")
    return Decoded(count=blob.count, positions=positions, diffs=diffs, witness=blob.witness)


def element_type(blob: Blob) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"u{blob.itemsize}")


def check_fits(blob: Blob, target: np.ndarray) -> None:
    """`target` has the element type and count of the delta."""
    check_array(target, "old")
    if target.dtype != element_type(blob) or target.size != blob.count:
        raise DeltaError(
            f"The delta is of {blob.count} elements of {blob.itemsize} bytes; "
            f"the array has {target.size} {target.dtype}."
        )


def witness(positions: np.ndarray, values: np.ndarray) -> int:
    """64 bits that tell whether the same values stand at the same positions; the order does not matter."""
    x = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= values
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    return int(np.sum(x, dtype=np.uint64))


def _find(old: np.ndarray, new: np.ndarray, plan: ClassPlan) -> tuple[int, tuple[Track, ...], int]:
    """How much changes, the tracks of it, and their witness."""
    writers = [TrackWriter(is_wide=is_wide(round(share * 1e9), 10**9)) for share in plan.changed_share]
    sizes, changes, seen = [0] * len(writers), 0, 0
    for start in range(0, old.size, _CHUNK):
        before, after = old[start : start + _CHUNK], new[start : start + _CHUNK]
        found = np.flatnonzero(before != after)
        steps = after[found] - before[found]
        changes += found.size
        seen += witness(found + start, before[found])
        if len(writers) == 1:
            writers[0].append((found + sizes[0]).astype(np.uint64), steps)
            sizes[0] += before.size
            continue
        classes = class_of(before, plan.floors)
        changed_classes = classes[found]
        for k, writer in enumerate(writers):
            members = np.flatnonzero(classes == k)
            mine = changed_classes == k
            ranks = np.searchsorted(members, found[mine]) + sizes[k]
            writer.append(ranks.astype(np.uint64), steps[mine])
            sizes[k] += members.size
    tracks = [
        writer.finish(floor=floor, elements=size)
        for writer, floor, size in zip(writers, plan.floors, sizes, strict=True)
    ]
    return changes, tuple(tracks), seen % (1 << 64)


def _pack(positions: np.ndarray, diffs: np.ndarray, count: int) -> Track:
    writer = TrackWriter(is_wide=is_wide(round(positions.size / max(count, 1) * 1e9), 10**9))
    writer.append(positions.astype(np.uint64), diffs)
    return writer.finish(floor=0, elements=count)


def _unpack(track: Track, dtype: np.dtype[np.unsignedinteger]) -> tuple[np.ndarray, np.ndarray]:
    limit = track.elements
    return compiled.unpack(track, dtype, limit=limit) or unpack_in_numpy(track, dtype, limit=limit)


def _locate(
    old: np.ndarray, tracks: Sequence[Track], parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    floors, elements = [track.floor for track in tracks], [track.elements for track in tracks]
    found = locate(old, floors, elements, [ranks for ranks, _ in parts])
    order = np.argsort(found, kind="stable")
    return found[order], np.concatenate([steps for _, steps in parts])[order]


def lies_plainly(array: np.ndarray) -> bool:
    """Element after element, as kernels read it."""
    return array.flags.c_contiguous and array.flags.aligned


def check_array(array: np.ndarray, name: str) -> None:
    """`array` is of bit patterns that deltas are made of."""
    if array.ndim != 1 or array.dtype.str not in _TYPES or not lies_plainly(array):
        raise DeltaError(
            f"`{name}` is {array.dtype} of shape {array.shape}; deltas are of contiguous, aligned 1-D "
            "arrays of uint8, uint16 or uint32: bit patterns, as `tensor.view(...)` gives."
        )
    if array.size > MAX_COUNT:
        raise DeltaError(f"`{name}` has {array.size} elements; a delta holds at most {MAX_COUNT}.")
