"""How one dimension of a tensor is divided, and where a checkpoint box lies in a parameter that others share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import ShardError
from ..layout import Box, volume
from .layout import Block
from .model import Tensor, scale_box


class Part(NamedTuple):
    """Where a box of a checkpoint tensor lies in a parameter of one rank."""

    name: str
    """Checkpoint tensor."""
    box: Box
    """The box, in coordinates of the checkpoint tensor."""
    param: str
    """Parameter of the rank, in its own naming."""
    shape: tuple[int, ...]
    """Shape of that parameter, padding included."""
    start: tuple[int, ...]
    """Where the box begins in it. One dimension more than the box where experts are stacked."""
    model: str = "target"
    """`draft` for parameters of the speculative draft model."""

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Index into the parameter of a box that `self.box` contains; shaped as the box but for leading ones."""
        extra = len(self.start) - len(box)
        lead = tuple(slice(at, at + 1) for at in self.start[:extra])
        spans = zip(box, self.box, self.start[extra:], strict=True)
        return lead + tuple(slice(at + a - first, at + b - first) for (a, b), (first, _), at in spans)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return tuple((0, size) for size in shape)


def divided(size: int, parts: int, *, what: str) -> int:
    """Size of each of several equal parts.

    Raises:
        ShardError: they are not equal.
    """
    if size % parts:
        raise ShardError(f"{what}: {size} cannot be divided among {parts} ranks.")
    return size // parts


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def cut(tensor: Tensor, dim: int, start: int, stop: int, *, fp8_block: int | None) -> Box:
    """Take a range of one dimension of a weight, clipped to it; of block scales, those that go with that range."""
    shape = tensor.weight_shape or tensor.shape
    size = shape[dim]
    box = (*whole(shape[:dim]), (min(start, size), min(stop, size)), *whole(shape[dim + 1 :]))
    return scale_box(box, fp8_block) if tensor.weight_shape and fp8_block else box


def grouped(ranks: Iterable[int], boxes_of: Callable[[int], Iterable[Box]]) -> tuple[Block, ...]:
    """Collect the boxes of ranks into blocks, dropping empty ones."""
    holders: dict[Box, list[int]] = {}
    for rank in ranks:
        for box in boxes_of(rank):
            if volume(box):
                holders.setdefault(box, []).append(rank)
    return tuple(Block(box, tuple(sorted(held))) for box, held in sorted(holders.items()))
