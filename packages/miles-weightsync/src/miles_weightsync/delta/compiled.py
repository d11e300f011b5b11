"""The codecs through the compiled kernels: the same streams as the numpy code, or None where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from ..native.library import STREAM_FIELDS, Reader, Rows, Writer, find_kernels
from .blob import Track
from .classes import ClassPlan, wrong_base
from .errors import DeltaError
from .tracks import MAX_CHAIN, is_wide

_CHUNK = 1 << 18
"""Elements at a time: the buffers that they could fill stay in the cache as far as they do."""
_FAULTS = {
    1: "gaps that end before its changes do",
    2: "fewer long gaps than it announces",
    3: "fewer steps of a byte than it announces",
    4: "fewer steps of an element than it announces",
    5: "positions beyond its {limit} elements, or out of order",
    6: "a stream that goes on after its last change",
}
_WRONG_CLASS, _WRONG_WITNESS = 7, 8


def find(old: np.ndarray, new: np.ndarray, plan: ClassPlan) -> tuple[int, tuple[Track, ...], int] | None:
    """How many elements change, the tracks of them, and their witness."""
    kernels = find_kernels()
    if kernels is None:
        return None
    chunk = min(_CHUNK, old.size)
    writers = _Writers(plan, chunk, old.itemsize, gaps=chunk + chunk // 254 + 16, longs=chunk // 252 + 64)
    witness, changes = c_uint64(), 0
    floors = (c_uint32 * len(plan.floors))(*plan.floors)
    for start in range(0, old.size, _CHUNK):
        n = min(_CHUNK, old.size - start)
        at = [c_void_p(array.ctypes.data + start * old.itemsize) for array in (old, new)]
        changes += kernels.find(old.itemsize, *at, n, start, floors, len(floors), writers.structs, byref(witness))
        writers.take()
    return changes, writers.tracks(), witness.value


class _Writers:
    """The buffers that kernels fill, one set a class, emptied after every chunk."""

    def __init__(self, plan: ClassPlan, chunk: int, itemsize: int, *, gaps: int, longs: int) -> None:
        self._plan = plan
        sizes = (gaps, chunk, longs, chunk // 2 + 1, chunk, chunk * itemsize)
        self._buffers = [[np.empty(size, np.uint8) for size in sizes] for _ in plan.floors]
        self._pieces: list[list[list[np.ndarray]]] = [[[] for _ in STREAM_FIELDS] for _ in plan.floors]
        self.structs = (Writer * len(plan.floors))()
        for writer, buffers, share in zip(self.structs, self._buffers, plan.changed_share, strict=True):
            for name, buffer in zip(STREAM_FIELDS, buffers, strict=True):
                setattr(writer, name, buffer.ctypes.data)
            writer.is_wide = is_wide(round(share * 1e9), 10**9)

    def take(self) -> None:
        """Keep what the last chunk wrote."""
        for writer, buffers, pieces in zip(self.structs, self._buffers, self._pieces, strict=True):
            for name, buffer, kept in zip(STREAM_FIELDS, buffers, pieces, strict=True):
                nbytes = getattr(writer, f"num_{name}")
                if nbytes:
                    kept.append(buffer[:nbytes].copy())
                    setattr(writer, f"num_{name}", 0)

    def tracks(self) -> tuple[Track, ...]:
        for writer, pieces in zip(self.structs, self._pieces, strict=True):
            if writer.changes % 2:
                pieces[STREAM_FIELDS.index("steps")].append(np.array([writer.pending], np.uint8))
        return tuple(
            Track(
                floor=floor,
                elements=writer.elements,
                changes=writer.changes,
                is_wide=bool(writer.is_wide),
                streams=tuple(np.concatenate(p) if p else np.empty(0, np.uint8) for p in pieces),
            )
            for floor, writer, pieces in zip(self._plan.floors, self.structs, self._pieces, strict=True)
        )


def pack(positions: np.ndarray, steps: np.ndarray, *, count: int) -> Track | None:
    """The one track of changes that are known, at [n] ascending positions below `count`."""
    kernels = find_kernels()
    if kernels is None:
        return None
    plan, chunk = ClassPlan((0,), (positions.size / max(count, 1),)), min(_CHUNK, positions.size)
    writers = _Writers(plan, chunk, steps.itemsize, gaps=chunk * (MAX_CHAIN + 1), longs=chunk * 8)
    writers.structs[0].elements = count
    for start in range(0, positions.size, _CHUNK):
        where = positions[start : start + _CHUNK].astype(np.uint64)
        moves = np.ascontiguousarray(steps[start : start + _CHUNK])
        kernels.pack(steps.itemsize, where.ctypes.data, moves.ctypes.data, where.size, writers.structs)
        writers.take()
    return writers.tracks()[0]


def unpack(track: Track, dtype: np.dtype[Any], *, limit: int) -> tuple[np.ndarray, np.ndarray] | None:
    """`tracks.unpack`."""
    kernels = find_kernels()
    if kernels is None:
        return None
    positions, steps = np.empty(track.changes, np.uint64), np.empty(track.changes, dtype)
    fault = kernels.unpack(dtype.itemsize, byref(_reader(track, limit)), positions.ctypes.data, steps.ctypes.data)
    _raise(fault, limit)
    return positions, steps


def locate(
    old: np.ndarray, tracks: Sequence[Track], parts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Ascending uint64 positions and their steps, of the ranks and steps of every class."""
    kernels = find_kernels()
    if kernels is None:
        return None
    num, total = len(tracks), sum(track.changes for track in tracks)
    positions, steps = np.empty(total, np.uint64), np.empty(total, old.dtype)
    fault = kernels.locate(
        old.itemsize,
        old.ctypes.data,
        old.size,
        (c_uint32 * num)(*(track.floor for track in tracks)),
        num,
        (c_void_p * num)(*(ranks.ctypes.data for ranks, _ in parts)),
        (c_void_p * num)(*(moves.ctypes.data for _, moves in parts)),
        (c_int64 * num)(*(track.changes for track in tracks)),
        (c_uint64 * num)(*(track.elements for track in tracks)),
        positions.ctypes.data,
        steps.ctypes.data,
    )
    _raise(fault, old.size)
    return positions, steps


def patch(
    target: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    rows: tuple[int, int] | None,
    *,
    limit: int,
    adds: bool,
    witness: int | None,
) -> bool:
    """Put changes on `target`, or take them off; False where there are no kernels. Unchanged where it raises."""
    kernels = find_kernels()
    if kernels is None:
        return False
    where = target.ctypes.data, positions.ctypes.data, positions.itemsize, steps.ctypes.data, positions.size
    fault = kernels.patch(target.itemsize, *where, limit, Rows(*(rows or (0, 0))), not adds, _optional(witness))
    _raise(fault, limit)
    return True


def patch_track(target: np.ndarray, track: Track, rows: tuple[int, int] | None, witness: int | None) -> bool:
    """Decode a `fast` track and put it on `target`; False where there are no kernels. Unchanged where it raises."""
    kernels = find_kernels()
    if kernels is None:
        return False
    reader = _reader(track, track.elements)
    fault = kernels.patch_track(
        target.itemsize, target.ctypes.data, byref(reader), Rows(*(rows or (0, 0))), _optional(witness)
    )
    _raise(fault, track.elements)
    return True


def _reader(track: Track, limit: int) -> Reader:
    reader = Reader(*(stream.ctypes.data for stream in track.streams))
    sizes = dict(zip(STREAM_FIELDS, (stream.size for stream in track.streams), strict=True))
    reader.num_gaps, reader.num_longs = sizes["gaps"], sizes["longs"]
    reader.num_bytes, reader.num_escapes = sizes["bytes"], sizes["escapes"]
    reader.changes, reader.is_wide, reader.limit = track.changes, track.is_wide, limit
    return reader


def _optional(witness: int | None) -> Any:
    return None if witness is None else byref(c_uint64(witness))


def _raise(fault: int, limit: int) -> None:
    if fault == _WRONG_CLASS:
        raise wrong_base("a class of its elements has another size")
    if fault == _WRONG_WITNESS:
        raise wrong_base("where its changes belong, other values stand")
    if fault:
        raise DeltaError(f"The delta contradicts itself: a track has {_FAULTS[fault].format(limit=limit)}.")
