"""Deltas on live arrays: `apply`, `undo`, `apply_blob`, and `fold` of several into one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import compiled
from .blob import read_blob
from .classes import wrong_base
from .codec import Decoded, check_fits, check_positions, check_types, decode_blob, element_type, lies_plainly, witness
from .errors import DeltaError
from .tracks import check_tracks


def apply(target: np.ndarray, decoded: Decoded, *, columns: int | None = None, row_stride: int | None = None) -> None:
    """Add the changes to `target`, in place.

    Args:
        target: 1-D, of the type of the elements; as many as the delta has, or rows of `columns` elements that begin
            `row_stride` elements apart, position p being element p % columns of row p // columns.

    Raises:
        DeltaError: the target does not fit, or its values are not what the delta was made against; it is as before.
    """
    _patch(target, decoded, columns, row_stride, adds=True)


def undo(target: np.ndarray, decoded: Decoded, *, columns: int | None = None, row_stride: int | None = None) -> None:
    """Take the changes off again: the inverse of `apply`, with the same arguments and errors."""
    _patch(target, decoded, columns, row_stride, adds=False)


def apply_blob(
    target: np.ndarray,
    blob: bytes | memoryview | np.ndarray,
    *,
    columns: int | None = None,
    row_stride: int | None = None,
) -> None:
    """Decode and `apply` at once. Nothing is changed where this raises.

    Raises:
        DeltaError: the blob is damaged, or does not belong on `target`.
    """
    parts = read_blob(blob)
    old = None
    if parts.codec == "small":
        old = _dense(target, parts.count, columns, row_stride)
        check_fits(parts, old)
    else:
        _check_target(target, parts.count, element_type(parts), columns, row_stride)
        check_tracks(parts)
        rows = None if columns is None or row_stride is None else (columns, row_stride)
        if compiled.patch_track(target, parts.tracks[0], rows, parts.witness):
            return
    apply(target, decode_blob(parts, old=old), columns=columns, row_stride=row_stride)


def fold(deltas: Sequence[Decoded]) -> Decoded:
    """One delta that does what `deltas` do one after another."""
    if not deltas:
        raise DeltaError("There is nothing to fold; a chain has at least one delta.")
    first = deltas[0]
    for i, delta in enumerate(deltas):
        if delta.count != first.count or delta.diffs.dtype != first.diffs.dtype:
            raise DeltaError(
                f"Delta {i} of the chain is of {delta.count} {delta.diffs.dtype}, "
                f"the first of {first.count} {first.diffs.dtype}."
            )
    if len(deltas) == 1:
        return first
    positions = np.concatenate([d.positions for d in deltas])
    order = np.argsort(positions, kind="stable")  # merges runs that are in order already
    positions, diffs = positions[order], np.concatenate([d.diffs for d in deltas])[order]
    starts = np.flatnonzero(np.concatenate([[True], positions[1:] != positions[:-1]])) if positions.size else order
    diffs = np.add.reduceat(diffs, starts, dtype=diffs.dtype) if positions.size else diffs
    positions, moved = positions[starts], diffs != 0
    return Decoded(count=first.count, positions=positions[moved], diffs=diffs[moved])


def _patch(target: np.ndarray, decoded: Decoded, columns: int | None, stride: int | None, *, adds: bool) -> None:
    _check_target(target, decoded.count, decoded.diffs.dtype, columns, stride)
    check_types(decoded)
    rows = None if columns is None or stride is None else (columns, stride)
    positions, diffs = np.ascontiguousarray(decoded.positions), np.ascontiguousarray(decoded.diffs)
    if compiled.patch(target, positions, diffs, rows, limit=decoded.count, adds=adds, witness=decoded.witness):
        return
    check_positions(decoded)
    where = positions
    if columns is not None and stride is not None:
        where = where.astype(np.int64)
        where = where // columns * stride + where % columns
    values = target[where]
    old = values if adds else values - decoded.diffs
    if decoded.witness is not None and witness(decoded.positions, old) != decoded.witness:
        raise wrong_base(f"where its {where.size} changes belong, other values stand")
    target[where] = values + decoded.diffs if adds else old


def _dense(target: np.ndarray, count: int, columns: int | None, stride: int | None) -> np.ndarray:
    """The elements of the delta one after another: a copy where `target` is strided."""
    if columns is None or stride is None:
        return target
    _check_target(target, count, target.dtype, columns, stride)
    if count == 0:
        return target[:0].copy()
    rows = -(-count // columns)
    spread = (target.strides[0] * stride, target.strides[0])
    whole, rest = np.lib.stride_tricks.as_strided(target, (rows - 1, columns), spread), count - (rows - 1) * columns
    last = target[(rows - 1) * stride :][:rest]
    return np.concatenate([whole.ravel(), last])


def _check_target(target: np.ndarray, count: int, dtype: np.dtype, columns: int | None, stride: int | None) -> None:
    if target.ndim != 1 or target.dtype != dtype or not target.flags.writeable or not lies_plainly(target):
        raise DeltaError(
            f"The delta is of {dtype}; the target is {target.dtype} of shape {target.shape}"
            f"{'' if target.flags.writeable else ', and read-only'}. It must be 1-D, contiguous, aligned, "
            "writable and of the same type; rows that lie apart are given by `columns` and `row_stride`."
        )
    if (columns is None) != (stride is None):
        raise DeltaError("`columns` and `row_stride` go together: give both or none.")
    if columns is None or stride is None:
        fits = target.size == count
    else:
        if columns < 1 or stride < columns:
            raise DeltaError(f"Rows of {columns} elements cannot begin {stride} elements apart.")
        rows, rest = divmod(count, columns)
        fits = target.size >= (rows * stride + rest if rest else max(rows - 1, 0) * stride + min(rows, 1) * columns)
    if not fits:
        layout = "" if columns is None else f" in rows of {columns}, {stride} apart"
        raise DeltaError(f"The delta is of {count} elements{layout}; the target has {target.size}.")
