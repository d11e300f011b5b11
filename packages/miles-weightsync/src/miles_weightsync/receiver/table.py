"""Which bytes of a rank's arena belong to which part of which parameter; sent once per plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from ..layout import Box, volume


class Piece(NamedTuple):
    """A block of a live parameter."""

    param: str
    """Its name; parameters of a draft model carry the prefix `draft:`."""
    box: Box
    """In coordinates of the parameter, as this rank holds it."""
    start: int
    """First byte in the bucket, a multiple of the element size."""
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.item_bytes

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.box)


class Bucket(NamedTuple):
    """Pieces that one trainer rank writes with one checksum. Gaps between pieces are zero."""

    sender: int
    start: int
    """First byte in the arena of a full push."""
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """All buckets of one engine rank."""

    plan: str
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Size of the arena of a full push."""
        return max((bucket.start + bucket.nbytes for bucket in self.buckets), default=0)

    def to_json(self) -> dict[str, object]:
        names = sorted({piece.param for bucket in self.buckets for piece in bucket.pieces})
        index = {name: position for position, name in enumerate(names)}
        buckets = [
            [b.sender, b.start, b.nbytes, [[index[p.param], p.box, p.start, p.item_bytes] for p in b.pieces]]
            for b in self.buckets
        ]
        return {"plan": self.plan, "params": names, "buckets": buckets}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Table:
        names = cast("list[str]", data["params"])
        buckets = [
            Bucket(sender, start, nbytes, tuple(_piece(names, entry) for entry in pieces))
            for sender, start, nbytes, pieces in cast(
                "list[tuple[int, int, int, list[tuple[int, list[list[int]], int, int]]]]", data["buckets"]
            )
        ]
        return cls(str(data["plan"]), tuple(buckets))


def _piece(names: Sequence[str], entry: tuple[int, list[list[int]], int, int]) -> Piece:
    index, box, start, item_bytes = entry
    return Piece(names[index], tuple((first, last) for first, last in box), start, item_bytes)
