"""The safetensors container, read and written with numpy alone.

Layout: u64 little-endian header length, JSON header padded with spaces to 8 bytes, then the tensors. Written largest
item size first, so that every array is aligned and can be viewed in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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


def write_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """One safetensors file holding `tensors` and the string `metadata`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks: list[memoryview] = []
    offset = 0
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        dtype = _TO_NAME.get(array.dtype.name)
        if dtype is None:
            raise WireError(f"Tensor {name!r} has type {array.dtype}; safetensors holds {', '.join(_TO_NAME)}.")
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        chunks.append(np.ascontiguousarray(array, _TO_DTYPE[dtype]).reshape(-1).view(np.uint8).data)
        offset += array.nbytes
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    return b"".join((len(head).to_bytes(8, "little"), head, *chunks))


def read_tensors(data: bytes | bytearray | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file, viewed in place, and its string metadata.

    Raises:
        WireError: `data` is torn or no safetensors file.
    """
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or 8 + size > len(view):
        raise WireError(f"{len(view)} bytes are no whole safetensors file: its header alone would take {8 + size}.")
    try:
        header = msgspec.json.decode(view[8 : 8 + size], type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"The {size} header bytes are no safetensors header: {error}.") from error
    metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    body = view[8 + size :]
    return {name: _tensor(name, entry, body) for name, entry in header.items()}, metadata


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> np.ndarray:
    try:
        dtype, shape, (start, end) = _TO_DTYPE[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        num_bytes = math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"Tensor {name!r} has an unreadable header entry {entry}.") from error
    if not 0 <= start <= end <= len(body) or end - start != num_bytes:
        raise WireError(
            f"Tensor {name!r} of shape {shape} and type {entry['dtype']} needs {num_bytes} bytes but is stored at "
            f"[{start}, {end}) of {len(body)}; the file is torn."
        )
    return np.frombuffer(body[start:end], dtype).reshape(shape)
