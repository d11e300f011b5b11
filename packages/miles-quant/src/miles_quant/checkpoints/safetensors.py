"""Safetensors files, one tensor at a time: memory never holds more than what is being read or written.

A file is an 8-byte length, a JSON header of that length (name -> dtype, shape, byte offsets) and the bytes in order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ..errors import ModelFolderError
from .files import partial_of, publish

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Type and shape of one stored tensor, as a header says it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file opened for reading; header and size are checked when it is opened.

    Raises:
        ModelFolderError: the file is shorter or longer than its header says, or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                    raise ModelFolderError(f"{path} has {size} bytes, too few for its header; it is half-written.")
                self.header = file.read(length)
            entries = json.loads(self.header)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from error
        except json.JSONDecodeError as error:
            raise ModelFolderError(f"{path} is not a safetensors file: its header is not JSON.") from error
        if not isinstance(entries, dict):
            raise ModelFolderError(f"{path} is not a safetensors file: its header is not a table.")
        self.metadata: dict[str, str] = entries.pop("__metadata__", None) or {}
        end = 0
        tensors = [(name, *_entry(path, name, entry)) for name, entry in entries.items()]
        for name, info, start, stop in sorted(tensors, key=lambda tensor: tensor[2:]):
            if start != end or stop - start != info.num_bytes:
                raise ModelFolderError(
                    f"{name} in {path} lies at {start}:{stop}; expected {end}:{end + info.num_bytes}."
                )
            self.infos[name], self._offsets[name], end = info, 8 + length + start, stop
        if 8 + length + end != size:
            raise ModelFolderError(
                f"{path} has {size} bytes and its header describes {8 + length + end}; it is half-written or damaged."
            )

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        info = self.infos[name]
        flat = torch.empty(info.num_bytes, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offsets[name])
            view, got = flat.numpy().data, 0
            while got < info.num_bytes:
                count = file.readinto(view[got:])
                if not count:
                    raise ModelFolderError(f"{self.path} ended {info.num_bytes - got} bytes before {name} did.")
                got += count
        return flat.view(info.dtype).reshape(info.shape)


class TensorWriter:
    """A safetensors file written tensor by tensor into `path.partial`, which becomes `path` when it is complete.

    A `.partial` file with the same header is continued: `done` counts the tensors that it holds already.

    Args:
        infos: every tensor of the file, in the order in which they will be written.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._names = list(infos)
        self._infos = dict(infos)
        header = _header(infos, metadata)
        self._ends = [len(header)]
        for info in infos.values():
            self._ends.append(self._ends[-1] + info.num_bytes)
        self.done = self._open(header)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        info = self._infos[name]
        assert name == self._names[self.done], f"{name} written where {self._names[self.done]} was announced"
        assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), f"{name} is not as announced"
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.done += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            assert self.done == len(self._names), f"{self.done} of {len(self._names)} tensors of {self.path} written"
            publish(self._file, self.path)
        self._file.close()

    def _open(self, header: bytes) -> int:
        """Open the partial file after its last whole tensor, or a new one after its header; whole tensors counted."""
        partial = partial_of(self.path)
        self._file = partial.open("r+b" if partial.exists() else "w+b")
        if self._file.read(len(header)) != header:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(header)
            return 0
        size = os.fstat(self._file.fileno()).st_size
        done = max(i for i, end in enumerate(self._ends) if end <= size)
        self._file.seek(self._ends[done])
        self._file.truncate()
        return done


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """What a header says of one tensor, and where it starts and ends."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            isinstance(n, int) and n >= 0 for n in shape
        ):
            if dtype not in _DTYPES:
                raise ModelFolderError(f"{name} in {path} has dtype {dtype}, which is not covered.")
            return TensorInfo(dtype=_DTYPES[dtype], shape=tuple(shape)), start, stop
        case _:
            raise ModelFolderError(
                f"{path} is damaged: it describes {name} as {str(entry)[:200]}, which is no dtype, shape and offsets."
            )


def _header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, info in infos.items():
        stop = start + info.num_bytes
        entries[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text
