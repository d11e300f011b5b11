"""What this trainer rank holds, as bit patterns in the engines' element types, now and as it was pushed last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ..buckets import torch_dtype
from ..layout import Box, ShardSpec
from ..planner.plan import within
from .tables import Item

Bits = NDArray[np.unsignedinteger]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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


class Snapshot:
    """What was last pushed: the base of deltas. One copy of this rank's shards in host memory."""

    def __init__(self) -> None:
        self.content: str | None = None
        """Which weights these are."""
        self._blocks: dict[tuple[str, Box, str], Bits] = {}

    def take(self, values: Values, items: Iterable[Item], content: str) -> None:
        """Keep the blocks that pieces are cut from."""
        self.content = None  # a copy that breaks off is the base of nothing
        wanted = {(item.name, item.block, item.dtype) for item in items}
        for key in self._blocks.keys() - wanted:
            del self._blocks[key]
        for key in wanted:
            self._blocks[key] = values.whole(*key)
        self.content = content

    def drop(self) -> None:
        self.content = None
        self._blocks.clear()

    def read(self, item: Item) -> Bits | None:
        """[elements] of a piece as it was; None where it was not pushed."""
        found = self._blocks.get((item.name, item.block, item.dtype))
        if found is None:
            return None
        return np.ascontiguousarray(found[within(item.box, item.block)]).reshape(-1)


def _bits(tensor: torch.Tensor, dtype: str) -> Bits:
    sent = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous()
    return sent.view(_SIGNED[sent.element_size()]).numpy().view(_UNSIGNED[sent.element_size()])
