"""Boxes: which part of which tensor a rank holds, and whether the parts make the whole. Plain Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ShardError

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension; a scalar has the empty box ()."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard without its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    def check(self) -> None:
        """Raise `ShardError` unless the box lies inside the tensor."""
        if len(self.box) != len(self.shape):
            raise ShardError(
                f"`{self.name}`: box {show(self.box)} has {len(self.box)} dimensions, the tensor {self.shape} "
                f"has {len(self.shape)}."
            )
        for dim, ((start, stop), size) in enumerate(zip(self.box, self.shape, strict=True)):
            if not 0 <= start <= stop <= size:
                raise ShardError(
                    f"`{self.name}`: box {show(self.box)} leaves the tensor {self.shape} in dimension {dim}: "
                    f"need 0 <= {start} <= {stop} <= {size}."
                )


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlaps(a: Box, b: Box) -> bool:
    """Whether two non-empty boxes share an element."""
    return all(
        start < other_stop and other_start < stop for (start, stop), (other_start, other_stop) in zip(a, b, strict=True)
    )


def show(box: Box) -> str:
    """`[0:4, 2:8]`, as one would write the slice."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[int, Box]]) -> None:
    """Assert that distinct boxes of several ranks tile a tensor exactly.

    Args:
        boxes: (rank, box) with no two boxes equal and none empty.

    Raises:
        ShardError: two boxes overlap, or elements are missing; names the tensor, the ranks and the boxes.
    """
    ordered = sorted(boxes, key=lambda entry: entry[1])
    active: list[tuple[int, Box]] = []
    for rank, box in ordered:
        # Sorted by first start: a box that ended before this one begins cannot meet any later box.
        active = [entry for entry in active if not entry[1] or entry[1][0][1] > box[0][0]]
        for other_rank, other in active:
            if overlaps(other, box):
                raise ShardError(
                    f"`{name}` {shape}: box {show(other)} of rank {other_rank} and box {show(box)} of rank {rank} "
                    "overlap without being equal. Ranks must hold the same block or disjoint ones."
                )
        active.append((rank, box))
    covered, wanted = sum(volume(box) for _, box in boxes), math.prod(shape)
    if covered != wanted:
        raise ShardError(
            f"`{name}` {shape}: the shards cover {covered} of {wanted} elements; boxes given: "
            + ", ".join(f"rank {rank} {show(box)}" for rank, box in ordered[:8])
            + (f" and {len(ordered) - 8} more." if len(ordered) > 8 else ".")
        )
