"""What a push sends of the weights that changed, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from .tables import EnginePlan, Item, Load
from .values import Base, Values

Codec = Literal["fast", "small"]
"""See `delta`."""


Sizes = Mapping[tuple[str, str], tuple[tuple[int, ...], ...] | str]
"""By engine plan and by the content that a delta starts from: for each engine rank the bytes of each bucket, or why
there is no delta."""

_PAYS_BELOW = 0.5
"""A delta is sent when it has less than this share of the bytes of a full push."""


class Blobs:
    """The deltas of one push on one base: each piece encoded once, whatever the number of engines that need it."""

    def __init__(self, values: Values, base: Base, codec: Codec) -> None:
        self._values, self._base = values, base
        self._codec: Codec = codec
        self._known: dict[Item, bytes] = {}

    def sizes(self, loads: Sequence[Load]) -> list[tuple[int, int, int]] | None:
        """(engine rank, bucket, bytes) of each bucket; None where there is nothing to take a difference to."""
        found: list[tuple[int, int, int]] = []
        for load in loads:
            blobs = [self._encode(item) for item in load.items]
            if any(blob is None for blob in blobs):
                return None
            found.append((load.dst, load.bucket, sum(len(blob or b"") for blob in blobs)))
        return found

    def of(self, load: Load) -> list[bytes]:
        """One blob a piece, encoded before by `sizes`."""
        return [self._known[_key(item)] for item in load.items]

    def _encode(self, item: Item) -> bytes | None:
        from .. import delta

        key = _key(item)
        if key not in self._known:
            old = self._base.read(item)
            if old is None or old.itemsize > 4:
                return None
            self._known[key] = delta.encode(old, self._values.read(item), codec=self._codec)
        return self._known[key]


def judge(
    plan: EnginePlan, parts: Sequence[Sequence[tuple[int, int, int]] | None]
) -> tuple[tuple[int, ...], ...] | str:
    """Bytes of every bucket of a delta, by engine rank; or why a full push is better."""
    of: dict[tuple[int, int], int] = {}
    for part in parts:
        if part is None:
            return "not every tensor has a base or a codec"
        of |= {(dst, index): size for dst, index, size in part}
    share = sum(of.values()) / max(plan.nbytes, 1)
    if share >= _PAYS_BELOW:
        return f"the delta would have {share:.0%} of the bytes"
    return tuple(
        tuple(of[dst, index] for index in range(len(table.buckets))) for dst, table in enumerate(plan.tables_R)
    )


def _key(item: Item) -> Item:
    """A piece wherever it lies in a bucket."""
    return item._replace(start=0)
