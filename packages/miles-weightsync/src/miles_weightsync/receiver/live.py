"""The parameters that an engine rank serves from, as bit patterns: swap, add differences, take checksums.

```
 full    staged ⇄ live, chunk by chunk: afterwards the arena holds the old values, and the same again undoes it
 delta   live += difference;  undone by live -= difference
```
Every step is counted, so that whatever stops in the middle is undone exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..bits import NUMPY_SIGNED, SIGNED, UNSIGNED, as_signed
from ..layout import show
from .table import Piece

Bits = NDArray[np.unsignedinteger]
"""Elements as unsigned integers of their size."""

_CHUNK_BYTES = 1 << 20
"""Swapped at a time: fits a core's cache."""
DRAFT = "draft:"


class Difference(Protocol):
    """A decoded delta of one piece; see `delta`."""

    @property
    def count(self) -> int: ...


class LiveError(Exception):
    """The parameters are not what the plan says. Names the parameter."""


class Live:
    """The parameters of the models of one rank. Looked up anew at each use: engines replace them."""

    def __init__(self) -> None:
        self._models: dict[str, torch.nn.Module] = {}

    def serve(self, model: torch.nn.Module, role: str) -> None:
        """Take a model in: `target` or `draft`."""
        self._models[role] = model

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        return self._models

    @property
    def is_on_gpu(self) -> bool:
        return any(parameter.is_cuda for parameter in self.parameters().values())

    def parameters(self) -> dict[str, torch.Tensor]:
        """By name; a parameter under two names is listed once."""
        return {
            ("" if role == "target" else DRAFT) + name: parameter.data
            for role, model in self._models.items()
            for name, parameter in model.named_parameters()
        }

    def check(self, pieces: Iterable[Piece]) -> None:
        """Raises LiveError unless every piece lies in a parameter with elements of its size."""
        parameters = self.parameters()
        for piece in pieces:
            found = parameters.get(piece.param)
            if found is None:
                raise LiveError(f"`{piece.param}`: the engine has no such parameter")
            fits = len(piece.box) == found.dim() and all(
                0 <= start < stop <= size for (start, stop), size in zip(piece.box, found.shape, strict=True)
            )
            if not fits or found.element_size() != piece.item_bytes:
                raise LiveError(
                    f"`{piece.param}` is {_name(found)} {tuple(found.shape)} in the engine; the plan writes "
                    f"{show(piece.box)} of elements of {piece.item_bytes} bytes"
                )

    def blocks(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The live block of each piece, as signed integers of its element size."""
        parameters = self.parameters()
        for piece in pieces:
            yield piece, parameters[piece.param].view(SIGNED[piece.item_bytes])[piece.slices]


def flat(block: torch.Tensor) -> Bits:
    """[elements] of a live block; shares its memory where it lies in one run on the host."""
    return _bits(block.cpu()).reshape(-1)


def swap(block: torch.Tensor, staged: NDArray[np.uint8]) -> Iterator[torch.Tensor]:
    """Exchange a live block and its staged bytes, chunk by chunk, giving each. The same steps again undo it."""
    item = block.element_size()
    rows = block.shape[0] if block.dim() else 1
    new = staged.view(UNSIGNED[item]).reshape(block.shape)
    if not block.dim():
        block, new = block.reshape(1), new.reshape(1)
    step = max(1, _CHUNK_BYTES * rows // max(block.numel() * item, 1))
    if block.is_cuda:
        step = rows
    for first in range(0, rows, step):
        chunk = block[first : first + step]
        _swap(chunk, new[first : first + step])
        yield chunk


def _swap(block: torch.Tensor, new: Bits) -> None:
    if block.is_cuda:
        host = _from_numpy(new.view(NUMPY_SIGNED[block.element_size()]))
        old = block.clone()
        block.copy_(host, non_blocking=True)
        host.copy_(old)
        return
    # numpy, not copy_(): that splits every block among OpenMP threads that spin for one another beside a busy engine.
    live = _bits(block)
    old_bits = live.copy()
    np.copyto(live, new)
    np.copyto(new, old_bits)


def add(block: torch.Tensor, decoded: Difference, *, undo: bool) -> None:
    """Add a decoded difference to a live block, or take it away again."""
    from .. import delta

    if block.is_cuda:
        _add_cuda(block, decoded, undo=undo)
        return
    bits = _bits(block)
    target, columns, stride = flat_rows(bits)
    change = delta.undo if undo else delta.apply
    if columns == stride or target.size == bits.size:
        change(target[: bits.size], cast("delta.Decoded", decoded))
    else:
        change(target, cast("delta.Decoded", decoded), columns=columns, row_stride=stride)


def _add_cuda(block: torch.Tensor, decoded: Difference, *, undo: bool) -> None:
    from .. import delta

    found = cast("delta.Decoded", decoded)
    positions = _from_numpy(found.positions.astype(np.int64)).to(block.device)
    diffs = _from_numpy(found.diffs.view(NUMPY_SIGNED[block.element_size()])).to(block.device)
    columns = block.shape[-1]
    rows = block.reshape(-1, columns) if block.is_contiguous() else block.squeeze()
    assert rows.data_ptr() == block.data_ptr(), "a block of a parameter must be addressable by row and column"
    index = (positions // columns, positions % columns)
    rows[index] = rows[index] - diffs if undo else rows[index] + diffs


def flat_rows(bits: Bits) -> tuple[Bits, int, int]:
    """A block as one strided run: ([elements up to the last one], columns, elements from row to row).

    Raises:
        LiveError: it is no matrix in memory (two dimensions that do not follow one another).
    """
    item = bits.itemsize
    dims = [(size, step // item) for size, step in zip(bits.shape, bits.strides, strict=True) if size != 1]
    columns, stride = 1, 1
    rows = 1
    while dims and dims[-1][1] == columns:
        columns *= dims.pop()[0]
    stride = columns
    if dims:
        rows, stride = dims.pop()
        while dims and dims[-1][1] == rows * stride:
            rows *= dims.pop()[0]
    if dims:
        raise LiveError(f"a block of shape {bits.shape} with strides {bits.strides} is no matrix in memory")
    length = (rows - 1) * stride + columns
    return np.lib.stride_tricks.as_strided(bits, (length,), (item,)), columns, stride


def update(state: xxhash.xxh3_128, block: torch.Tensor) -> None:
    """Feed a block, as signed integers, in row-major order."""
    bits = _bits(block.cpu())
    if bits.flags.c_contiguous:
        state.update(bits.reshape(-1).view(np.uint8).data)
        return
    step = max(1, _CHUNK_BYTES * bits.shape[0] // bits.nbytes)
    for first in range(0, bits.shape[0], step):
        state.update(np.ascontiguousarray(bits[first : first + step]).reshape(-1).view(np.uint8).data)


def checksum(block: torch.Tensor) -> str:
    """xxh3-128 of one block."""
    state = xxhash.xxh3_128()
    if block.numel():
        update(state, as_signed(block.detach()))
    return state.hexdigest()


_from_numpy: Callable[[object], torch.Tensor] = cast(Any, torch).from_numpy


def _bits(block: torch.Tensor) -> Bits:
    return block.numpy().view(UNSIGNED[block.element_size()])


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
