"""Group the shards of all ranks into buckets, in one order that every rank derives alike."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from .errors import ShardError
from .layout import Box, ShardSpec, check_cover, volume

ALIGN_BYTES = 64
"""Every tensor of a bucket starts at a multiple of this, so a view in its dtype is valid and copies are aligned."""

_FUSED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor and the rank that sends it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a whole tensor lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Element type in the bucket."""
    source_dtype: str
    """Element type of the shards."""
    start: int
    """First byte in the bucket."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are staged and loaded together."""

    index: int
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.slots[-1].stop


def make_buckets(
    specs_R: Sequence[Sequence[ShardSpec]],
    *,
    bucket_bytes: int,
    dtype: str | None = None,
    kept: Collection[str] = (),
    align: int = ALIGN_BYTES,
) -> tuple[Bucket, ...]:
    """Plan which rank sends what into which bucket; equal input gives an equal plan on every rank.

    A block that several ranks hold is sent by the one with the fewest bytes so far.

    Args:
        specs_R: for each rank R, the shards it holds.
        bucket_bytes: a bucket is closed before it grows past this.
        dtype: element type that floating-point tensors are sent as; None keeps theirs.
        kept: tensors that keep their element type whatever `dtype` is.
        align: start every tensor at a multiple of this; with 1 a bucket has no gaps, and one that would start a
            tensor off its element size is closed first.

    Raises:
        ShardError: a tensor is not covered exactly once, or ranks disagree on its shape or dtype.
    """
    tensors = _by_name(specs_R)
    sent_R = [0] * len(specs_R)
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for name in sorted(tensors, key=load_order):
        spec, holders = tensors[name]
        check_cover(name, spec.shape, [(ranks[0], box) for box, ranks in holders.items()])
        sent_as = spec.dtype
        if dtype is not None and torch_dtype(spec.dtype).is_floating_point and name not in kept:
            sent_as = dtype
        slot = Slot(name, spec.shape, sent_as, spec.dtype, -(-end // align) * align, _choose_senders(holders, sent_R))
        if slots and (slot.stop > bucket_bytes or slot.start % torch_dtype(sent_as).itemsize):
            buckets.append(Bucket(len(buckets), tuple(slots)))
            slots, slot = [], replace(slot, start=0)
        slots.append(slot)
        end = slot.stop
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots)))
    return tuple(buckets)


def load_order(name: str) -> tuple[object, ...]:
    """Sort key: layers in number order, and the parts of a fused parameter side by side in the order of fusion.

    Checksums of fused parameters are computed while buckets pass by: a part that comes before its turn is kept.
    """
    position = 0
    for group in _FUSED_TOGETHER:
        for index, part in enumerate(group):
            if part in name:
                name, position = name.replace(part, group[0]), index
    words = re.split(r"(\d+)", name)
    return (tuple((int(word), "") if word.isdigit() else (-1, word) for word in words), position)


def torch_dtype(name: str) -> torch.dtype:
    """`"float32"` → `torch.float32`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardError(f"`{name}` is not a torch dtype.")
    return dtype


def _by_name(specs_R: Sequence[Sequence[ShardSpec]]) -> dict[str, tuple[ShardSpec, dict[Box, list[int]]]]:
    tensors: dict[str, tuple[ShardSpec, dict[Box, list[int]]]] = {}
    first_rank: dict[str, int] = {}
    for rank, specs in enumerate(specs_R):
        for spec in specs:
            known, holders = tensors.setdefault(spec.name, (spec, {}))
            other = first_rank.setdefault(spec.name, rank)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise ShardError(
                    f"`{spec.name}`: rank {other} says {known.dtype} {known.shape}, "
                    f"rank {rank} says {spec.dtype} {spec.shape}."
                )
            holders.setdefault(spec.box, []).append(rank)
    return tensors


def _choose_senders(holders: dict[Box, list[int]], sent_R: list[int]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for box in sorted(holders):
        rank = min(holders[box], key=lambda candidate: (sent_R[candidate], candidate))
        sent_R[rank] += volume(box)
        pieces.append(Piece(rank, box))
    return tuple(pieces)
