"""Blocks of tensors in one safetensors file, and any part of any tensor out of several such files.

Which block of which tensor an entry is stands in the file's metadata, so a reader with another number of ranks finds
the parts it needs. Nothing is pickled: a checkpoint from somebody else cannot run code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from miles_tito.shared.safetensors import pack_header
from safetensors import safe_open
from torch import Tensor

from miles_train.trainer import Box

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_KEY = "miles"
_CHUNK = 64 << 20


class Block(NamedTuple):
    """The part of one tensor that one rank holds, to be written or filled."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    """Half-open (start, stop) in each dimension of the whole tensor."""
    tensor: Tensor


def file_bytes(blocks: Sequence[Block], extra: Mapping[str, Any]) -> int:
    """Size of the file that `write_blocks` would write."""
    return len(_header(_sorted(blocks), extra)) + sum(block.tensor.nbytes for block in blocks)


def write_blocks(path: Path, blocks: Sequence[Block], extra: Mapping[str, Any]) -> int:
    """Write a safetensors file, durable when this returns; returns its size.

    Args:
        extra: plain data to keep beside the blocks.
    """
    ordered = _sorted(blocks)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(_header(ordered, extra)))
        for block in ordered:
            _write(file.fileno(), block.tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


class BlockFile:
    """What one rank wrote of a checkpoint, opened to load from; its bytes are mapped and read when asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")
        known = json.loads((self._file.metadata() or {})[_KEY])
        self.extra: dict[str, Any] = known["extra"]
        self._places: dict[str, tuple[tuple[int, ...], Box]] = {
            name: (tuple(shape), tuple((start, stop) for start, stop in box))
            for name, (shape, box) in known["blocks"].items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the whole tensor that a block belongs to."""
        return {name: shape for name, (shape, _) in self._places.items()}

    def get(self, name: str) -> Tensor | None:
        """The block of this file as it is."""
        return self._file.get_tensor(name) if name in self._places else None

    def copy_into(self, target: Tensor, name: str, box: Box) -> int:
        """Fill what `target`, the block `box` of tensor `name`, shares with this file's; returns its elements."""
        if name not in self._places:
            return 0
        _, mine = self._places[name]
        shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, box, strict=True)]
        if any(start >= stop for start, stop in shared):
            return 0
        if not shared:
            target.copy_(self._file.get_tensor(name))
            return 1
        source = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(shared, mine, strict=True))
        place = tuple(slice(s - c, e - c) for (s, e), (c, _) in zip(shared, box, strict=True))
        part = self._file.get_slice(name)[source]
        target[place].copy_(part)
        return part.numel()


def _sorted(blocks: Sequence[Block]) -> list[Block]:
    """Widest type first: every entry then begins at a multiple of its width."""
    return sorted(blocks, key=lambda block: -block.tensor.element_size())


def _header(blocks: Sequence[Block], extra: Mapping[str, Any]) -> bytes:
    known = {"blocks": {block.name: [block.global_shape, block.box] for block in blocks}, "extra": dict(extra)}
    entries = ((b.name, _NAMES[b.tensor.dtype], b.tensor.shape, b.tensor.nbytes) for b in blocks)
    return pack_header(entries, {_KEY: json.dumps(known)})


def _write(descriptor: int, data: memoryview) -> None:
    """All of it, in chunks: a call writes 2 GiB at most."""
    while data:
        data = data[os.write(descriptor, data[:_CHUNK]) :]
