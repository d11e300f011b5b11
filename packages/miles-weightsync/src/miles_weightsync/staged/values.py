"""What this trainer rank holds, as bit patterns in the engines' element types, now and as it was pushed last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..bits import UNSIGNED, as_signed
from ..buckets import torch_dtype
from ..layout import Box, ShardSpec
from ..planner.plan import within
from .tables import Item

Bits = NDArray[np.unsignedinteger]


class Values:
    """The shards of one push."""

    def __init__(self, blocks: Mapping[ShardSpec, torch.Tensor]) -> None:
        self._blocks = {(spec.name, spec.box): tensor for spec, tensor in blocks.items()}

    def read(self, item: Item) -> Bits:
        """[elements] of a piece; shares memory with the shard where it can."""
        block = self._blocks[item.name, item.block]
        return _bits(block[within(item.box, item.block)], item.dtype).reshape(-1)

    def whole(self, name: str, block: Box, dtype: str) -> Bits:
        """A copy of a whole block."""
        return _bits(self._blocks[name, block], dtype).copy()


Key = tuple[str, Box, str]
"""Name, box of the block, element type."""


@dataclass(frozen=True, slots=True)
class _Step:
    """From the weights of one push to those of the next."""

    content: str
    """Where it starts."""
    version: int
    """The number of those weights."""
    blobs: Mapping[Key, bytes]


class Base:
    """The weights of an earlier push, as far as this rank holds them."""

    def __init__(self, blocks: Mapping[Key, Bits], steps: Sequence[_Step]) -> None:
        """`steps` lead from these weights to `blocks`."""
        self._blocks, self._steps = blocks, steps
        self._restored: dict[Key, Bits | None] = {}

    def read(self, item: Item) -> Bits | None:
        """[elements] of a piece as it was; None where it was not pushed."""
        found = self._block((item.name, item.block, item.dtype))
        return None if found is None else np.ascontiguousarray(found[within(item.box, item.block)]).reshape(-1)

    def _block(self, key: Key) -> Bits | None:
        if not self._steps:
            return self._blocks.get(key)
        if key not in self._restored:
            self._restored[key] = self._restore(key)
        return self._restored[key]

    def _restore(self, key: Key) -> Bits | None:
        from .. import delta

        blobs = [step.blobs.get(key) for step in self._steps]
        now = self._blocks.get(key)
        if now is None or any(blob is None for blob in blobs):
            return None
        old = now.copy()
        folded = delta.fold([delta.decode(blob) for blob in blobs if blob is not None])
        delta.undo(old.reshape(-1), folded)
        return old


class Snapshot:
    """What was last pushed: the base of deltas. One copy of this rank's shards in host memory.

    Args:
        history: pushes before that one that can be a base as well. Each takes the memory of a delta.
    """

    def __init__(self, *, history: int = 0) -> None:
        self.content: str | None = None
        """Which weights these are."""
        self._version = 0
        self._history = history
        self._blocks: dict[Key, Bits] = {}
        self._steps: list[_Step] = []

    def take(self, values: Values, items: Iterable[Item], content: str, version: int) -> None:
        """Keep the blocks that pieces are cut from."""
        before, steps = self.content, self._steps
        self.content, self._steps = None, []  # a copy that breaks off is the base of nothing
        wanted = {(item.name, item.block, item.dtype) for item in items}
        for key in self._blocks.keys() - wanted:
            del self._blocks[key]
        blobs: dict[Key, bytes] = {}
        for key in wanted:
            new = values.whole(*key)
            old = self._blocks.get(key)
            if self._history and old is not None and new.itemsize <= 4:
                blobs[key] = _difference(old, new)
            self._blocks[key] = new
        if self._history and before is not None:
            self._steps = [*steps, _Step(before, self._version, blobs)][-self._history :]
        self.content, self._version = content, version

    def named(self, version: int) -> str | None:
        """The newest weights that were pushed under this number, and are a base still."""
        known = {step.version: step.content for step in self._steps}
        return self.content if version == self._version else known.get(version)

    def at(self, content: str) -> Base | None:
        """The weights of a push; None where they are not known, or no longer."""
        if content == self.content:
            return Base(self._blocks, ())
        starts = [step.content for step in self._steps]
        return Base(self._blocks, self._steps[starts.index(content) :]) if content in starts else None

    def drop(self) -> None:
        self.content = None
        self._blocks.clear()
        self._steps.clear()


def _difference(old: Bits, new: Bits) -> bytes:
    from .. import delta

    return delta.encode(old.reshape(-1), new.reshape(-1), codec="fast")


def _bits(tensor: torch.Tensor, dtype: str) -> Bits:
    sent = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous()
    return as_signed(sent).numpy().view(UNSIGNED[sent.element_size()])
