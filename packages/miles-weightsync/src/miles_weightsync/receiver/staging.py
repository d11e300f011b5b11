"""One push on one engine rank: from the arena that senders fill to parameters that can still be put back.

```
 filling ──verify──▶ verified ──commit──▶ swapped ──finalize──▶ gone, the new version is served
    │                   │  ▲                │ └──undo──▶ gone, the old version is served
    └──────discard──────┘  └─put back itself┘
```
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..transports import Inbox, Region
from . import derived
from .live import Difference, Live, add, flat, swap, update
from .table import Bucket, Piece, Table

_SHOWN = 4


class StagingFault(Exception):
    """What was staged cannot be served; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What PREPARE announces."""

    epoch: int
    version: int
    content: str
    """Names the exact weights: pushes that carry different ones differ in it, also under the same version."""
    base: str | None
    """Content that a delta starts from; None for a full push."""
    sizes: tuple[int, ...] | None
    """Bytes of each bucket of a delta."""


@dataclass(slots=True)
class Staged:
    """An arena and what has been done with it."""

    order: Order
    table: Table
    live: Live
    inbox: Inbox
    region: Region
    state: Literal["filling", "verified", "swapped", "broken"] = "filling"
    contents: list[str] = field(default_factory=list[str])
    differences: list[list[Difference]] = field(default_factory=list[list[Difference]])
    done: int = 0
    """Steps that the parameters are away from the old version."""
    pinned: bool = False

    @property
    def is_broken(self) -> bool:
        """Neither version is whole."""
        return self.state == "broken"

    def verify(
        self, digests: Sequence[tuple[str, str]], lengths: Sequence[Sequence[int]] | None, timeout_s: float
    ) -> None:
        """Check that the arena holds what senders sent, and decode it if it is a delta.

        Args:
            digests: for each bucket, xxh3-128 of what was sent and of the new values.
            lengths: for each bucket of a delta, the bytes of each piece's blob.

        Raises:
            StagingFault: it does not; names the buckets.
        """
        self.inbox.seal(self.region, timeout_s=timeout_s)
        if len(digests) != len(self.table.buckets):
            raise StagingFault(f"{len(digests)} checksums for {len(self.table.buckets)} buckets")
        arena = self.inbox.view(self.region)
        wrong = [
            _tell(index, bucket)
            for index, (bucket, span) in enumerate(zip(self.table.buckets, self._spans(), strict=True))
            if xxhash.xxh3_128_hexdigest(arena[span].data) != digests[index][0]
        ]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise StagingFault(f"checksums of what arrived differ: {'; '.join(wrong[:_SHOWN])}{more}")
        if lengths is not None:
            self.differences = self._decode(arena, lengths)
        self.contents = [content for _, content in digests]
        self.state = "verified"

    def commit(self) -> dict[str, float]:
        """Bring what was staged into the live parameters and prove that it is there; put the old ones back if not.

        Returns:
            Seconds of each part.

        Raises:
            StagingFault: the old version is live, whole, unless `state` is `broken`.
        """
        assert self.state == "verified", f"only what is verified can be committed, not what is {self.state}"
        clock = _Clock()
        self.live.check(piece for bucket in self.table.buckets for piece in bucket.pieces)
        try:
            wrong = [
                _tell(index, bucket)
                for index, bucket in enumerate(self.table.buckets)
                if self._apply(index, bucket) != self.contents[index]
            ]
            clock.lap("apply")
            if wrong:
                raise StagingFault(f"the parameters are not what was sent: {'; '.join(wrong[:_SHOWN])}")
            derived.refresh(self.live.models)
            clock.lap("derive")
        except Exception as error:  # whatever it was: the old version must be whole again before anything else
            self.put_back()
            if isinstance(error, StagingFault):
                raise
            raise StagingFault(f"{type(error).__name__}: {error}") from error
        self.state = "swapped"
        return clock.seconds

    def put_back(self) -> None:
        """Undo every step that was done.

        Raises:
            StagingFault: that failed too; nothing may be served until a full push has been committed.
        """
        try:
            for _ in islice(self._undoing(), self.done):
                pass
            self.done = 0
            derived.refresh(self.live.models)
        except Exception as error:
            self.state = "broken"
            raise StagingFault(f"the old weights could not be put back: {type(error).__name__}: {error}") from error
        self.state = "verified"

    def release(self) -> None:
        """Give the arena back."""
        self.differences = []
        if self.pinned:
            _unpin(self.inbox.view(self.region))
        self.inbox.release(self.region)

    def pin(self) -> None:
        """Let a GPU copy from the arena directly."""
        arena = self.inbox.view(self.region)
        if arena.nbytes:
            runtime = cast(Any, torch.cuda).cudart()
            self.pinned = int(runtime.cudaHostRegister(arena.ctypes.data, arena.nbytes, 0)) == 0  # if not, it is slower

    def _apply(self, index: int, bucket: Bucket) -> str:
        """Bring one bucket into the parameters; the checksum of what is live there afterwards, read while in cache."""
        state = xxhash.xxh3_128()
        end = 0
        for place, (piece, block) in enumerate(self.live.blocks(bucket.pieces)):
            state.update(bytes(piece.start - end))
            for part in self._piece(index, place, piece, block, undo=False):
                self.done += 1
                update(state, part)
            end = piece.start + piece.nbytes
        state.update(bytes(bucket.nbytes - end))
        return state.hexdigest()

    def _undoing(self) -> Iterator[None]:
        """The steps of `_apply` in the same order: they are independent, so any first n of them undo the first n."""
        for index, bucket in enumerate(self.table.buckets):
            for place, (piece, block) in enumerate(self.live.blocks(bucket.pieces)):
                for _ in self._piece(index, place, piece, block, undo=True):
                    yield

    def _piece(
        self, index: int, place: int, piece: Piece, block: torch.Tensor, *, undo: bool
    ) -> Iterator[torch.Tensor]:
        """Change one piece step by step; each step gives the rows that it has changed."""
        if self.order.sizes is not None:
            add(block, self.differences[index][place], undo=undo)
            yield block
            return
        first = self.table.buckets[index].start + piece.start
        yield from swap(block, self.inbox.view(self.region)[first : first + piece.nbytes])

    def _spans(self) -> list[slice]:
        if self.order.sizes is None:
            return [slice(bucket.start, bucket.start + bucket.nbytes) for bucket in self.table.buckets]
        spans: list[slice] = []
        start = 0
        for size in self.order.sizes:
            spans.append(slice(start, start + size))
            start += size
        return spans

    def _decode(self, arena: NDArray[np.uint8], lengths: Sequence[Sequence[int]]) -> list[list[Difference]]:
        from .. import delta

        found: list[list[Difference]] = []
        for bucket, span, sizes in zip(self.table.buckets, self._spans(), lengths, strict=True):
            start = span.start
            decoded: list[Difference] = []
            for (piece, block), size in zip(self.live.blocks(bucket.pieces), sizes, strict=True):
                change = delta.decode(arena[start : start + size], old=flat(block))
                if change.count != piece.nbytes // piece.item_bytes:
                    raise StagingFault(
                        f"`{piece.param}`: a delta of {change.count} elements for a block of {piece.box}"
                    )
                decoded.append(change)
                start += size
            found.append(decoded)
        return found


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def _tell(index: int, bucket: Bucket) -> str:
    names = list(dict.fromkeys(piece.param for piece in bucket.pieces))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"bucket {index} of trainer rank {bucket.sender} ({', '.join(names[:2])}{more})"


def _unpin(arena: NDArray[np.uint8]) -> None:
    runtime = cast(Any, torch.cuda).cudart()
    runtime.cudaHostUnregister(arena.ctypes.data)
