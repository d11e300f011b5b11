"""The order in which Blackwell's block-scaled GEMMs read scales: tiles of 128x4. Checkpoints are not in this order."""

from __future__ import annotations

import torch


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """[R, C] one-byte scales -> flat, padded with zeros to whole tiles of 128 rows and 4 columns.

    Element (r, c) goes to (r/128 * tiles + c/4) * 512 + (r % 32) * 16 + (r/32 % 4) * 4 + c % 4.
    """
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of `swizzle_scales`, for scales of `shape` [R, C]."""
    rows, columns = shape
    tiles = swizzled.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns].contiguous()
