"""The safetensors container, read and written with numpy alone.

Layout: u64 little-endian header length, JSON header padded with spaces to 8 bytes, then the tensors. Written largest
item size first, so that every array is aligned and can be viewed in place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from miles_tito.errors import WireError

_TO_NAME = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_TO_DTYPE = {name: np.dtype(dtype).newbyteorder("<") for dtype, name in _TO_NAME.items()}


class TensorEntry(NamedTuple):
    """Where one tensor lies in a safetensors file."""

    dtype: str
    """As safetensors writes it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the file's beginning."""
    end: int


class SafetensorsHeader(NamedTuple):
    """What a safetensors file says of its content."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    """Where the header ends."""


def pack_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file whose tensors follow one another: widest type first keeps every one aligned.

    Args:
        tensors: name, dtype as safetensors writes it, shape and bytes of each.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a file, whose tensors are not read.

    Raises:
        WireError: it is torn or no safetensors file.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        total = os.fstat(file.fileno()).st_size
        try:
            return _parse(file.read(size) if size <= total else b"", size, total)
        except WireError as error:
            raise WireError(f"{path}: {error}") from error


def write_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """One safetensors file holding `tensors` and the string `metadata`."""
    arrays = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, array in arrays:
        if array.dtype.name not in _TO_NAME:
            raise WireError(f"Tensor {name!r} has type {array.dtype}; safetensors holds {', '.join(_TO_NAME)}.")
    head = pack_header([(name, _TO_NAME[a.dtype.name], a.shape, a.nbytes) for name, a in arrays], metadata)
    little = (np.ascontiguousarray(a, _TO_DTYPE[_TO_NAME[a.dtype.name]]) for _, a in arrays)
    return b"".join((head, *(array.reshape(-1).view(np.uint8).data for array in little)))


def read_tensors(data: bytes | bytearray | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, viewed in place, and its string metadata.

    Raises:
        WireError: `data` is torn or no safetensors file.
    """
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    header = _parse(view[8 : 8 + size], size, len(view))
    return {name: _tensor(name, entry, view) for name, entry in header.tensors.items()}, header.metadata


def _parse(head: bytes | memoryview, size: int, total: int) -> SafetensorsHeader:
    if total < 8 or 8 + size > total:
        raise WireError(f"{total} bytes are no whole safetensors file: its header alone would take {8 + size}.")
    try:
        entries = msgspec.json.decode(head, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"The {size} header bytes are no safetensors header: {error}.") from error
    metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
    tensors = {name: _entry(name, entry, 8 + size) for name, entry in entries.items()}
    return SafetensorsHeader(tensors, metadata, 8 + size)


def _entry(name: str, entry: dict[str, Any], data_start: int) -> TensorEntry:
    try:
        start, end = entry["data_offsets"]
        return TensorEntry(str(entry["dtype"]), tuple(map(int, entry["shape"])), data_start + start, data_start + end)
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"Tensor {name!r} has an unreadable header entry {entry}.") from error


def _tensor(name: str, entry: TensorEntry, file: memoryview) -> np.ndarray:
    dtype = _TO_DTYPE.get(entry.dtype)
    if dtype is None:
        raise WireError(f"Tensor {name!r} has type {entry.dtype}; numpy reads {', '.join(_TO_DTYPE)}.")
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    if not 0 <= entry.start <= entry.end <= len(file) or entry.end - entry.start != num_bytes:
        raise WireError(
            f"Tensor {name!r} of shape {entry.shape} and type {entry.dtype} needs {num_bytes} bytes but is stored at "
            f"[{entry.start}, {entry.end}) of {len(file)}; the file is torn."
        )
    return np.frombuffer(file[entry.start : entry.end], dtype).reshape(entry.shape)
