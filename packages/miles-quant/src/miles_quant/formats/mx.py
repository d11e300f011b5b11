"""MXFP8 and MXFP4: blocks of 32 along a row, one power of two each (E8M0), E4M3 or E2M1 codes.

The exponent e of a block follows from its largest absolute value by one of three rules:

    rceil   smallest e with amax * fp32(1 / max) <= 2^e, read off the bits      (CUDA `cvt.rp`, Transformer Engine)
    floor   exponent of amax, minus that of the largest power of two in the type  (OCP MX v1.0 §6.3)
    even    as floor, after rounding amax to the type's mantissa                  (torchao)

Codes are x * 2^-e, exact but for the last rounding, saturating. A block of zeros has e = 0; NaN gives 255, and for
rceil Inf gives 254. With e = 255 every value of the block is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import fold, shape_of, unfold
from .numbers import (
    E2M1_MAX,
    E4M3_MAX,
    from_e2m1,
    from_e8m0,
    pack_nibbles,
    reciprocal_e8m0,
    to_e2m1,
    to_e4m3,
    unpack_nibbles,
)
from .spec import Format, QuantizedTensor, StoredPart

_BLOCK = 32


@dataclass(frozen=True)
class MxFormat(Format):
    """`mxfp8/<rule>` and `mxfp4/<rule>`."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        if self._is_fp8:
            return (
                StoredPart(suffix="weight", dtype=torch.float8_e4m3fn, tile=(1, 1), content="codes"),
                StoredPart(suffix="weight_scale_inv", dtype=torch.uint8, tile=self.block, content="scale"),
            )
        return (
            StoredPart(suffix="weight_packed", dtype=torch.uint8, tile=(1, 2), content="codes"),
            StoredPart(suffix="weight_scale", dtype=torch.uint8, tile=self.block, content="scale"),
        )

    @property
    def block(self) -> tuple[int, int]:
        return 1, _BLOCK

    @property
    def activation(self) -> Format | None:
        return self if self._is_fp8 else None

    @property
    def _is_fp8(self) -> bool:
        return self.name.family == "mxfp8"

    def quantize_in_torch(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        del amax
        blocks = fold(weight.float(), self.block)
        exponents = self._exponents(blocks.abs().amax(dim=(1, 3)))
        scaled = unfold(blocks * reciprocal_e8m0(exponents)[:, None, :, None], weight.shape)
        codes = to_e4m3(scaled) if self._is_fp8 else pack_nibbles(to_e2m1(scaled))
        return QuantizedTensor(codes=codes, scale=exponents.to(torch.uint8), shape=shape_of(weight))

    def _exponents(self, amax: torch.Tensor) -> torch.Tensor:
        """int32 biased exponents of the blocks."""
        largest, top_exponent, mantissa_bits = (E4M3_MAX, 8, 3) if self._is_fp8 else (E2M1_MAX, 2, 1)
        if self.name.rule == "rceil":
            reciprocal = torch.tensor(1.0 / largest, dtype=torch.float32, device=amax.device)
            bits = (amax * reciprocal).view(torch.int32)
            exponents, mantissa = bits >> 23, bits & 0x7F_FFFF
            rounds_up = torch.where(exponents == 0, mantissa > 0x40_0000, mantissa > 0) & (exponents < 254)
            exponents = torch.where(amax.isinf(), 254, exponents + rounds_up.int())
        else:
            bits = amax.view(torch.int32)
            if self.name.rule == "even":
                bits = bits + (1 << (22 - mantissa_bits))
            exponents = ((bits >> 23 & 0xFF) - top_exponent).clamp(min=0)
        return torch.where(amax.isnan(), 255, exponents)

    def dequantize_in_torch(self, quantized: QuantizedTensor) -> torch.Tensor:
        if self._is_fp8:
            values = quantized.codes.float()
        else:
            values = from_e2m1(unpack_nibbles(quantized.codes, quantized.shape[1]))
        return unfold(fold(values, self.block) * from_e8m0(quantized.scale)[:, None, :, None], quantized.shape)
