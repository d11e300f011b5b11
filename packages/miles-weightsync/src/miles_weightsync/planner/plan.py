"""The copy planner: what is held x what is needed → the fewest bytes, sent by the least loaded replica.

```
 every needed tensor ─▶ held boxes x needed boxes ─▶ pieces (once per way of cutting) ─▶ one copy per needing rank
                                                                     one holder: it sends │ several: largest piece
                                                                                          ▼ first, least loaded sends
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ShardError
from ..layout import Box, overlaps, show, volume
from .layout import ITEM_BYTES, Block, Layout, TensorLayout


class Copy(NamedTuple):
    """One box of one tensor from one rank to another. Boxes are in coordinates of the whole tensor."""

    src: int
    """Rank that sends, in the source layout."""
    dst: int
    """Rank that receives, in the target layout."""
    name: str
    box: Box
    """What is copied."""
    src_block: Box
    """The block of the sender that contains it."""
    dst_block: Box
    """The block of the receiver that contains it."""
    nbytes: int

    @property
    def src_slices(self) -> tuple[slice, ...]:
        """Where the box lies in the sender's block."""
        return within(self.box, self.src_block)

    @property
    def dst_slices(self) -> tuple[slice, ...]:
        """Where the box lies in the receiver's block."""
        return within(self.box, self.dst_block)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every copy of one update, and its bytes."""

    copies: tuple[Copy, ...]
    """In the order of the target layout's tensors."""
    sent: dict[int, int]
    """Bytes that each source rank sends, idle ranks included."""
    received: dict[int, int]
    """Bytes that each target rank receives."""
    bytes_needed: int
    """Bytes of all boxes that target ranks need, counted from the target layout alone."""

    @property
    def bytes_moved(self) -> int:
        return sum(self.sent.values())

    @property
    def sender_max_over_mean(self) -> float:
        return _max_over_mean(self.sent.values())

    @property
    def receiver_max_over_mean(self) -> float:
        return _max_over_mean(self.received.values())

    def by_sender(self, rank: int) -> list[Copy]:
        """The copies that a source rank sends."""
        return [copy for copy in self.copies if copy.src == rank]

    def by_receiver(self, rank: int) -> list[Copy]:
        """The copies that a target rank receives."""
        return [copy for copy in self.copies if copy.dst == rank]


def make_plan(source: Layout, target: Layout) -> Plan:
    """Plan the copies that give every target rank its boxes. The same layouts always give the same plan.

    When a rank leaves, plan again with `source.without({rank})` or `target.without({rank})`.

    Raises:
        ShardError: a needed tensor or part of it is held by nobody, source boxes overlap without being equal, boxes of
            one target rank overlap, or the sides disagree on shape or dtype.
    """
    patterns: dict[tuple[int, int], list[_Piece]] = {}
    sent = dict.fromkeys(source.hosts, 0)
    received = dict.fromkeys(target.hosts, 0)
    copies: list[Copy] = []
    open_choices: list[tuple[int, int, int, tuple[int, ...]]] = []
    needed = 0
    for name, wanted in target.tensors.items():
        held = _held(source, name, wanted)
        key = id(held.blocks), id(wanted.blocks)
        if (pieces := patterns.get(key)) is None:
            pieces = patterns[key] = _pieces(name, held, wanted)
        width = ITEM_BYTES[wanted.dtype]
        needed += width * sum(volume(box) * len(ranks) for box, ranks in wanted.blocks)
        for src_ranks, dst_ranks, box, src_block, dst_block, elements in pieces:
            nbytes, src = elements * width, src_ranks[0]
            for dst in dst_ranks:
                if len(src_ranks) == 1:
                    sent[src] += nbytes
                else:
                    open_choices.append((len(src_ranks), -nbytes, len(copies), src_ranks))
                received[dst] += nbytes
                copies.append(Copy(src, dst, name, box, src_block, dst_block, nbytes))
    # Fewest replicas first, then the largest: what can still be moved around comes last and fills the gaps.
    open_choices.sort()
    for _, negative_bytes, position, ranks in open_choices:
        src = min(ranks, key=sent.__getitem__)
        sent[src] -= negative_bytes
        copies[position] = Copy(src, *copies[position][1:])
    plan = Plan(tuple(copies), sent, received, needed)
    assert plan.bytes_moved == needed, f"planned {plan.bytes_moved} bytes for {needed} needed"
    return plan


def within(box: Box, block: Box) -> tuple[slice, ...]:
    """Index of a box inside a block that contains it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, block, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that two boxes share; None when there are none."""
    shared = tuple((max(i, j), min(k, m)) for (i, k), (j, m) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


class _Piece(NamedTuple):
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    box: Box
    src_block: Box
    dst_block: Box
    elements: int


def _held(source: Layout, name: str, wanted: TensorLayout) -> TensorLayout:
    held = source.tensors.get(name)
    if held is None:
        raise ShardError(f"`{name}` is needed by the target but no source rank holds any of it.")
    if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
        raise ShardError(
            f"`{name}`: the source holds {held.dtype} {held.shape}, the target needs {wanted.dtype} {wanted.shape}. "
            "Convert on the source before planning."
        )
    return held


def _pieces(name: str, held: TensorLayout, wanted: TensorLayout) -> list[_Piece]:
    """Intersect both sides of one way of cutting and assert an exact cover without overlap."""
    for one, other in _overlapping(held.blocks):
        raise ShardError(
            f"`{name}` {held.shape}: box {show(one.box)} of rank {one.ranks[0]} and box {show(other.box)} of rank "
            f"{other.ranks[0]} overlap without being equal. Source ranks must hold the same block or disjoint ones."
        )
    for one, other in _overlapping(wanted.blocks):
        if both := set(one.ranks) & set(other.ranks):
            raise ShardError(
                f"`{name}` {wanted.shape}: rank {min(both)} needs the overlapping boxes {show(one.box)} and "
                f"{show(other.box)}; its boxes must be disjoint."
            )
    pieces: list[_Piece] = []
    for dst_block, dst_ranks in wanted.blocks:
        found = [(shared, block) for block in held.blocks if (shared := intersect(block.box, dst_block)) is not None]
        if sum(volume(shared) for shared, _ in found) != volume(dst_block):
            missing = _subtract(dst_block, [shared for shared, _ in found])
            raise ShardError(
                f"`{name}` {wanted.shape}: rank {dst_ranks[0]} needs {show(dst_block)} but no source rank holds "
                f"{', '.join(show(box) for box in missing[:3])}{' …' if len(missing) > 3 else ''}."
            )
        pieces += [_Piece(b.ranks, dst_ranks, shared, b.box, dst_block, volume(shared)) for shared, b in found]
    return pieces


def _overlapping(blocks: Iterable[Block]) -> Iterator[tuple[Block, Block]]:
    active: list[Block] = []
    for block in sorted(blocks):
        # Sorted by first start: a box that ended before this one begins cannot meet any later box.
        active = [other for other in active if not other.box or other.box[0][1] > block.box[0][0]]
        for other in active:
            if overlaps(other.box, block.box):
                yield other, block
        active.append(block)


def _subtract(box: Box, holes: list[Box]) -> list[Box]:
    rest = [box]
    for hole in holes:
        rest = [part for whole in rest for part in _cut_out(whole, hole)]
    return rest


def _cut_out(box: Box, hole: Box) -> list[Box]:
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    parts: list[Box] = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for span in ((start, first), (last, stop)):
            if span[0] < span[1]:
                parts.append((*shared[:dim], span, *box[dim + 1 :]))
    return parts


def _max_over_mean(loads: Iterable[int]) -> float:
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
