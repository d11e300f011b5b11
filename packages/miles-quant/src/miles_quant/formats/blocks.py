"""A matrix cut into the blocks that share a scale, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def shape_of(matrix: torch.Tensor) -> tuple[int, int]:
    """(N, K)."""
    rows, columns = matrix.shape
    return rows, columns


def fold(matrix: torch.Tensor, block: Sequence[int]) -> torch.Tensor:
    """[N, K] -> [N/b0, b0, K/b1, b1], edges padded with zeros to whole blocks."""
    rows, columns = block
    pad_rows, pad_columns = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if pad_rows or pad_columns:
        matrix = torch.nn.functional.pad(matrix, (0, pad_columns, 0, pad_rows))
    return matrix.reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)


def unfold(blocks: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `fold`: [N/b0, b0, K/b1, b1] -> [N, K] without the padding."""
    n0, b0, n1, b1 = blocks.shape
    return blocks.reshape(n0 * b0, n1 * b1)[: shape[0], : shape[1]].contiguous()
