"""The bytes of a delta: a header that describes and checks itself, a table of tracks, compressed streams.

    header  magic, format, codec, element bytes, flags, count, changes, witness, bytes that follow, xxh3-128 of all this
    table   LEB128 numbers: tracks; for each: floor, elements, changes, is_wide, then raw and stored bytes of 6 streams
    streams one after another, each a zstd frame where that is shorter

All numbers are little-endian and unsigned; counts have 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import xxhash
import zstandard

from .errors import DeltaError

Codec = Literal["fast", "small"]
CODECS: tuple[Codec, ...] = ("fast", "small")
STREAMS = ("gaps", "lows", "longs", "steps", "bytes", "escapes")

MAX_COUNT = 1 << 55
"""Elements that an array may have; the arithmetic of gaps stays within 64 bits."""

EXPONENT_SHIFT = {1: 3, 2: 7, 4: 23}
"""Bits below the exponent of e4m3, bfloat16 and float32, by the bytes of an element. Classes begin at exponents; of
other formats they are as fine, if less apt."""

_MAGIC, _FORMAT = b"\x93MWD", 1
_HEADER = struct.Struct("<4s4B4Q")
_DIGEST_BYTES = 16
_HAS_WITNESS = 1
_MAX_TRACKS = 16
_MAX_RATIO = 1 << 16
"""No zstd frame expands further (a block holds at most 128 KiB and takes at least 4 bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Ascending positions and the step at each, as six byte streams."""

    floor: int
    """Elements with at least this magnitude (bits without the sign), and less than the next track's, belong here."""
    elements: int
    """How many elements of the old array those are."""
    changes: int
    is_wide: bool
    """Gaps are long: their low byte has a stream of its own."""
    streams: tuple[np.ndarray, ...]
    """uint8 each, in the order of `STREAMS`; `tracks` says what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A delta, taken apart but not decoded."""

    codec: Codec
    itemsize: int
    """Bytes of an element: 1, 2 or 4."""
    count: int
    """Elements of the array."""
    changes: int
    witness: int | None
    """`witness` of the positions and the old values there; None in a folded delta, where they are not known."""
    tracks: tuple[Track, ...]


def write_blob(blob: Blob) -> bytes:
    """`blob` as bytes."""
    table, body = bytearray(_varint(len(blob.tracks))), list[bytes]()
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
    for track in blob.tracks:
        table += b"".join(map(_varint, (track.floor, track.elements, track.changes, int(track.is_wide))))
        for stream in track.streams:
            raw = stream.tobytes()
            stored = compressor.compress(raw) if len(raw) else b""
            if len(stored) >= len(raw):
                stored = bytes(raw)
            table += _varint(len(raw)) + _varint(len(stored))
            body.append(stored)
    payload = b"".join([table, *body])
    flags = 0 if blob.witness is None else _HAS_WITNESS
    kind = (_FORMAT, CODECS.index(blob.codec), blob.itemsize, flags)
    header = _HEADER.pack(_MAGIC, *kind, blob.count, blob.changes, blob.witness or 0, len(payload))
    return header + _digest(header, payload) + payload


def read_blob(data: bytes | memoryview | np.ndarray) -> Blob:
    """The delta in `data`, its digest and every number checked.

    Raises:
        DeltaError: `data` is not a delta, is cut short, or was changed.
    """
    view = memoryview(cast("bytes", data)).cast("B")
    start = _HEADER.size + _DIGEST_BYTES
    if len(view) < start:
        raise DeltaError(f"A delta has a header of {start} bytes; these are only {len(view)}. Fetch it again.")
    header, payload = view[: _HEADER.size], view[start:]
    fields = cast("tuple[bytes, int, int, int, int, int, int, int, int]", _HEADER.unpack(header))
    magic, version, codec, itemsize, flags, count, changes, witness, nbytes = fields
    if magic != _MAGIC:
        raise DeltaError(f"This is no delta: it begins with {bytes(magic)!r} instead of {_MAGIC!r}.")
    if version != _FORMAT:
        raise DeltaError(f"The delta has format {version}; this version of the package reads {_FORMAT}.")
    if len(payload) != nbytes:
        raise DeltaError(f"The delta should have {nbytes} bytes after its header and has {len(payload)}.")
    if _digest(header, payload) != bytes(view[_HEADER.size : start]):
        raise DeltaError(f"The delta of {len(view)} bytes was damaged: its digest differs. Fetch it again.")
    if (
        codec >= len(CODECS)
        or itemsize not in (1, 2, 4)
        or flags > _HAS_WITNESS
        or changes > count
        or count > MAX_COUNT
    ):
        raise DeltaError(f"The delta's header makes no sense: {codec=} {itemsize=} {flags=} {count=} {changes=}.")
    tracks = tuple(_read_tracks(payload, itemsize))
    if sum(track.changes for track in tracks) != changes or any(track.elements > count for track in tracks):
        raise DeltaError(f"The tracks of the delta do not add up to its {changes} changes among {count} elements.")
    return Blob(
        codec=CODECS[codec],
        itemsize=itemsize,
        count=count,
        changes=changes,
        witness=witness if flags & _HAS_WITNESS else None,
        tracks=tracks,
    )


def _digest(*parts: bytes | memoryview) -> bytes:
    known = xxhash.xxh3_128()
    for part in parts:
        known.update(part)
    return known.digest()


def _read_tracks(payload: memoryview, itemsize: int) -> Iterator[Track]:
    numbers = _Numbers(payload)
    num_tracks = numbers.take()
    if num_tracks > _MAX_TRACKS:
        raise DeltaError(f"The delta names {num_tracks} tracks; there are at most {_MAX_TRACKS}.")
    tables = [([numbers.take() for _ in range(4)], [(numbers.take(), numbers.take()) for _ in STREAMS])
              for _ in range(num_tracks)]  # fmt: skip
    at = numbers.at
    for (floor, elements, changes, is_wide), sizes in tables:
        _check_sizes(changes, is_wide, itemsize, [raw for raw, _ in sizes])
        streams = list[np.ndarray]()
        for raw, stored in sizes:
            streams.append(_read_stream(payload[at : at + stored], raw, stored))
            at += stored
        if changes > elements:
            raise DeltaError(f"A track of the delta has {changes} changes among {elements} elements.")
        yield Track(floor=floor, elements=elements, changes=changes, is_wide=bool(is_wide), streams=tuple(streams))
    if at != len(payload):
        raise DeltaError(f"The streams of the delta end at byte {at} of {len(payload)}.")


def _check_sizes(changes: int, is_wide: int, itemsize: int, raw: Sequence[int]) -> None:
    gaps, lows, longs, steps, large, escapes = raw
    fits = is_wide <= 1 and changes <= gaps and lows == changes * is_wide and longs <= 8 * changes and longs % 8 == 0
    fits = fits and steps == (changes + 1) // 2 and large <= changes
    fits = fits and escapes <= itemsize * large and escapes % itemsize == 0
    if not fits:
        raise DeltaError(f"The streams of a track with {changes} changes cannot have {list(raw)} bytes.")


def _read_stream(stored: memoryview, raw: int, nbytes: int) -> np.ndarray:
    if len(stored) != nbytes:
        raise DeltaError(f"A stream of {nbytes} bytes ends {nbytes - len(stored)} bytes after the delta's end.")
    if raw == nbytes:
        return np.frombuffer(stored, np.uint8)
    try:
        size = zstandard.frame_content_size(stored)
        if size != raw or raw > _MAX_RATIO * nbytes:
            raise DeltaError(f"A stream holds {size} bytes where the delta says {raw}.")
        out = zstandard.ZstdDecompressor().decompress(stored)
    except zstandard.ZstdError as error:
        raise DeltaError(f"A stream of the delta does not decompress: {error}.") from error
    if len(out) != raw:
        raise DeltaError(f"A stream decompresses to {len(out)} bytes where the delta says {raw}.")
    return np.frombuffer(out, np.uint8)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Numbers:
    """Reads LEB128 numbers one after another."""

    def __init__(self, payload: memoryview) -> None:
        self._payload, self.at = payload, 0

    def take(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            if self.at >= len(self._payload):
                raise DeltaError("The table of the delta's tracks is cut short.")
            byte = self._payload[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise DeltaError("A number in the delta's table has more than 63 bits.")
