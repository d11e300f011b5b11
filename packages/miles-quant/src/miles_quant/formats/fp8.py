"""FP8 (E4M3) with float32 scales: per tensor, per row, per 1x128 row block, per 128x128 tile, or any block.

Published rules for the scale differ in the last bit, so a contract has to name one:

    div      s = amax / 448,                codes = x / s           (DeepSeek-V3, arXiv:2412.19437 §3.3)
    miles    s = max(amax, 1e-10) / 448,    codes = x * (1 / s)     (radixark/miles exporter)
    te       e = min(448 / amax, FLT_MAX),  codes = x * e, s = 1/e  (Transformer Engine)
    te_pow2  as te with the mantissa of e cut to a power of two     (Transformer Engine on Blackwell)

A block of zeros has scale 1 (`miles`: 1e-10 / 448), and so has one whose scale underflows to zero. Arithmetic is
float32, rounding to nearest even, saturating at ±448. NaN in a block makes its scale and codes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .blocks import fold, shape_of, unfold
from .numbers import E4M3_MAX, FLOAT_MAX, divide, one_nan, to_e4m3
from .spec import Format, QuantizedTensor, StoredPart


@dataclass(frozen=True)
class Fp8Format(Format):
    """`fp8_<layout>/<rule>`."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        scale = "weight_scale" if 0 in self.block else "weight_scale_inv"
        return (
            StoredPart(suffix="weight", dtype=torch.float8_e4m3fn, tile=(1, 1), content="codes"),
            StoredPart(
                suffix=scale,
                dtype=torch.float32,
                tile=None if self.name.has_tensor_scale else self.block,
                whole_shape=(1,),
                content="scale",
            ),
        )

    @property
    def block(self) -> tuple[int, int]:
        match self.name.layout:
            case "tensor":
                return 0, 0
            case "row":
                return 1, 0
            case layout:
                rows, _, columns = layout.partition("x")
                return int(rows), int(columns)

    @property
    def activation(self) -> Format:
        layout = "row" if 0 in self.block else f"1x{self.block[1]}"
        return Fp8Format(replace(self.name, layout=layout))

    def quantize_in_torch(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        blocks = fold(weight.float(), self._block_of(weight.shape))
        whole = None if amax is None else amax.reshape(1, 1, 1, 1)
        amax_of_block = blocks.abs().amax(dim=(1, 3), keepdim=True) if whole is None else whole
        scaled, scale = _scale(blocks, amax_of_block, self.name.rule)
        codes = to_e4m3(unfold(scaled, weight.shape))
        return QuantizedTensor(codes=codes, scale=scale[:, 0, :, 0].contiguous(), shape=shape_of(weight))

    def dequantize_in_torch(self, quantized: QuantizedTensor) -> torch.Tensor:
        blocks = fold(quantized.codes.float(), self._block_of(quantized.shape))
        return unfold(blocks * quantized.scale[:, None, :, None], quantized.shape)

    def _block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.block[0] or shape[0], self.block[1] or shape[1]


def _scale(blocks: torch.Tensor, amax: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled blocks and stored scales, by tensor-by-tensor division throughout (see `divide`)."""
    one = torch.ones_like(amax)
    amax = one_nan(amax)
    if rule == "div":
        scale = torch.div(amax, torch.full_like(amax, E4M3_MAX))
        scale = torch.where(scale == 0, one, scale)
        return torch.div(blocks, scale), scale
    if rule == "miles":
        scale = torch.div(amax.clamp(min=1e-10), torch.full_like(amax, E4M3_MAX))
        return blocks * divide(1.0, scale), scale
    encode = divide(E4M3_MAX, amax).clamp(max=FLOAT_MAX)
    if rule == "te_pow2":
        encode = torch.where(encode.isnan(), encode, (encode.view(torch.int32) & 0x7F80_0000).view(torch.float32))
    encode = torch.where((amax == 0) | (encode == 0), one, encode)
    return blocks * encode, divide(1.0, encode)
