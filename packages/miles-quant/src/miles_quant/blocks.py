"""Matrices as a grid of blocks, and the checks that every format makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import QuantError


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


def check_quantizable(weight: torch.Tensor) -> None:
    """Raise QuantError unless `weight` is a finite floating matrix."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantError(f"Only floating matrices are quantised, got shape {tuple(weight.shape)} and {weight.dtype}.")
    if weight.numel() == 0:
        raise QuantError(f"A matrix of shape {tuple(weight.shape)} has nothing to quantise.")
    finite = torch.isfinite(weight)
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        raise QuantError(
            f"{int((~finite).sum())} of {weight.numel()} values are NaN or Inf, the first at [{row}, {column}]: "
            f"{weight[row, column].item()}. The weight was broken before quantisation."
        )
