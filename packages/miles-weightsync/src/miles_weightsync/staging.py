"""Where the ranks of one host lay the tensors of a bucket side by side for the engines to read.

```
 rank 0  ─┐ strided copies of    ┌──────────────┐   one name a reader   engine A
 rank 1  ─┼─ their own boxes ──▶ │ stage 0 │ 1  │ ────────────────────▶ engine B tp 0
 rank 2 ══╡ (another host: sent  └──────────────┘                       engine B tp 1
          └ to rank 0 by gloo)
```
Two stages, so that bucket i + 1 is written while the engines load bucket i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from .bits import SIGNED
from .buckets import Bucket, Slot, torch_dtype
from .collective import Ranks
from .cuda_ipc import CudaStage
from .layout import Box, ShardSpec, volume
from .payload import Handle, ShmHandle
from .shm import HEADER_BYTES, Segment

NUM_STAGES = 2

Blocks = Mapping[ShardSpec, torch.Tensor]


class Stage(Protocol):
    """One reusable place for a bucket, mapped by every rank of the leader's host."""

    @property
    def data(self) -> torch.Tensor:
        """[nbytes] uint8, the staged bytes."""
        ...

    def handle(self, bucket: Bucket) -> Handle:
        """A name under which one reader finds `bucket`; each reader needs its own."""
        ...

    def retire_handles(self) -> None:
        """Withdraw the names given out so far."""
        ...

    def close(self) -> None: ...


class ShmStage:
    """A stage in host shared memory."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._data: torch.Tensor | None = torch.frombuffer(segment.memory, dtype=torch.uint8, offset=HEADER_BYTES)

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None, "the stage is closed"
        return self._data

    def handle(self, bucket: Bucket) -> Handle:
        return ShmHandle(self._segment.link(), bucket.nbytes)

    def retire_handles(self) -> None:
        self._segment.unlink()

    def close(self) -> None:
        self._data = None
        self._segment.close()


class Staging:
    """The stages of a pusher: grown when a plan needs more room, reused otherwise."""

    def __init__(self, ranks: Ranks, *, kind: str) -> None:
        self._ranks = ranks
        self._kind = kind
        self._room = (0, 0)
        self.stages: tuple[Stage, ...] = ()
        """Empty on ranks of other hosts."""

    def ensure(self, buckets: tuple[Bucket, ...], *, is_local: bool) -> None:
        """Collective: make room for the largest bucket on the leader's host and map it on each of its ranks."""
        room = (min(NUM_STAGES, len(buckets)), max(bucket.nbytes for bucket in buckets))
        if self._room[0] >= room[0] and self._room[1] >= room[1]:  # alike on every rank
            return
        self.close()
        opened = self._ranks.agree("write", lambda: self._create(*room) if self._ranks.is_leader else None)[0]
        assert opened is not None
        attaches = is_local and not self._ranks.is_leader
        self._ranks.agree("write", lambda: self._attach(opened, room[1]) if attaches else None)
        self._room = room

    def retire_handles(self) -> None:
        """Withdraw every name that readers were given."""
        for stage in self.stages:
            stage.retire_handles()

    def close(self) -> None:
        """Free the stages and every name in /dev/shm."""
        for stage in self.stages:
            stage.close()
        self.stages, self._room = (), (0, 0)

    def _create(self, count: int, capacity: int) -> list[object]:
        if self._kind == "cuda_ipc":
            stages = [CudaStage.create(capacity) for _ in range(count)]
            self.stages = tuple(stages)
            return [stage.rebuild_args for stage in stages]
        segments: list[Segment] = []
        try:
            for _ in range(count):
                segments.append(Segment.create(capacity))
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        self.stages = tuple(ShmStage(segment) for segment in segments)
        return [segment.name for segment in segments]

    def _attach(self, opened: list[object], capacity: int) -> None:
        if self._kind == "cuda_ipc":
            self.stages = tuple(CudaStage.attach(args) for args in opened)
        else:
            self.stages = tuple(ShmStage(Segment.attach(str(name), capacity)) for name in opened)


def write_bucket(
    bucket: Bucket, data: torch.Tensor | None, blocks: Blocks, *, ranks: Ranks, local_R: list[bool]
) -> None:
    """Put this rank's pieces of a bucket in place: copied where memory is shared, sent to the leader where not.

    Args:
        data: [bucket.nbytes or more] uint8, the shared bytes; None on a rank of another host.
        local_R: for each rank R, whether it shares the leader's memory.
    """
    for slot in bucket.slots:
        for piece in slot.pieces:
            is_mine = piece.rank == ranks.rank
            if is_mine and data is not None:
                place(view(slot, data), piece.box, blocks[spec_of(slot, piece.box)])
            elif is_mine:
                block = blocks[spec_of(slot, piece.box)].to("cpu", torch_dtype(slot.dtype)).contiguous()
                ranks.send_to_leader(block.reshape(-1).view(torch.uint8))
            elif ranks.is_leader and not local_R[piece.rank]:
                assert data is not None
                place(view(slot, data), piece.box, _receive(slot, piece.box, ranks, piece.rank))
    if data is not None and data.is_cuda:
        torch.cuda.synchronize()  # the copies must have landed before the ranks agree that they have


def view(slot: Slot, data: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a slot, inside the bytes of its bucket."""
    return data[slot.start : slot.stop].view(torch_dtype(slot.dtype)).view(slot.shape)


def place(whole: torch.Tensor, box: Box, block: torch.Tensor) -> None:
    """Copy a block into its box, converting the element type on the way."""
    target = whole[tuple(slice(start, stop) for start, stop in box)]
    integers = SIGNED.get(block.element_size())
    if block.dtype == target.dtype and block.device.type == target.device.type == "cpu" and integers is not None:
        # Not copy_(): it splits every tensor among OpenMP threads that spin for one another, and beside a busy engine
        # that costs 20 times a plain copy.
        np.copyto(target.view(integers).numpy(), block.view(integers).numpy())
        return
    with torch.no_grad():
        target.copy_(block)


def spec_of(slot: Slot, box: Box) -> ShardSpec:
    return ShardSpec(slot.name, slot.shape, slot.source_dtype, box)


def _receive(slot: Slot, box: Box, ranks: Ranks, rank: int) -> torch.Tensor:
    dtype = torch_dtype(slot.dtype)
    data = torch.empty(volume(box) * dtype.itemsize, dtype=torch.uint8)
    ranks.receive(data, rank=rank)
    return data.view(dtype).view([stop - start for start, stop in box])
