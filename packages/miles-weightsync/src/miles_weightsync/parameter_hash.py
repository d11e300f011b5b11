"""The checksum of one parameter as an engine computes it, from parts that come in any order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from .planner import Part
from .tile_hash import TileHash


class ParameterHash:
    """Hash the bytes of a parameter as they lie there, padded with zeros where no part reaches.

    A part whose turn has come is hashed at once; one that comes early is copied and waits.
    """

    def __init__(self, shape: tuple[int, ...], parts: Sequence[Part], *, on_gpu: bool, item_bytes: int) -> None:
        """
        Args:
            shape: of the parameter; the last dimension, of two or more, is a row, and rows are hashed one by one.
            parts: all that will be added.
            on_gpu: the engine's hash is the tile hash and not SHA-256.
            item_bytes: of one element.
        """
        self._shape = shape
        self._row_bytes = (shape[-1] if len(shape) > 1 else 1) * item_bytes
        self._num_rows = math.prod(shape[:-1] if len(shape) > 1 else shape)
        self._turns = sorted(self._row_of(part) for part in parts)
        self._early: dict[int, torch.Tensor] = {}
        self._turn = self._row = 0
        self._tiles = TileHash(self._num_rows * self._row_bytes) if on_gpu else None
        self._sha = hashlib.sha256()

    def add(self, part: Part, block: torch.Tensor) -> bool:
        """Take the block of a part; whether it was the last one."""
        row, data = self._row_of(part), self._rows(block)
        if row != self._turns[self._turn]:
            self._early[row] = data.clone()
            return False
        self._take(row, data)
        while self._turn < len(self._turns) and (at := self._turns[self._turn]) in self._early:
            self._take(at, self._early.pop(at))
        return self._turn == len(self._turns)

    def hexdigest(self) -> str:
        """Of the whole parameter, after all parts."""
        self._pad(self._num_rows)
        return self._tiles.hexdigest() if self._tiles is not None else self._sha.hexdigest()[:16]

    def _row_of(self, part: Part) -> int:
        """Index of a part's first row among all rows of the parameter."""
        row = 0
        for at, size in zip(part.start[: max(len(self._shape) - 1, 1)], self._shape, strict=False):
            row = row * size + at
        return row

    def _rows(self, block: torch.Tensor) -> torch.Tensor:
        """[R, row bytes] of a block whose rows may be shorter than those of the parameter."""
        flat = block.reshape(-1, block.shape[-1]) if len(self._shape) > 1 else block.reshape(-1, 1)
        data = flat.contiguous().view(torch.uint8).reshape(flat.shape[0], -1)
        missing = self._row_bytes - data.shape[1]
        return torch.cat([data, data.new_zeros(data.shape[0], missing)], dim=1) if missing else data

    def _take(self, row: int, data: torch.Tensor) -> None:
        self._pad(row)
        self._update(data.reshape(-1))
        self._row += data.shape[0]
        self._turn += 1

    def _pad(self, row: int) -> None:
        if row > self._row:
            self._update(torch.zeros((row - self._row) * self._row_bytes, dtype=torch.uint8))
            self._row = row

    def _update(self, data: torch.Tensor) -> None:
        if self._tiles is not None:
            self._tiles.update(data)
        else:
            self._sha.update(data.cpu().numpy().data)
