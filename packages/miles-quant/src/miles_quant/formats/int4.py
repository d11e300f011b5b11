"""INT4 with one scale per group of a row: weights only, activations stay as they are.

    miles  s = max(amax * fp32(1/7), 1e-5),  c = rint(x / s) within ±7, then s is stored as bfloat16
    ct     in the type of the weight: s = amax / 7.5 (its epsilon for a group of zeros),  c = rint(x / s) within [-8, 7]
           (compressed-tensors' min-max observer)

Eight codes (c + 8) & 15 to an int32 word, low nibble first. A value is c * s with the *stored* scale: training against
the float32 scale differs from the engine in 5 % of the weights. A group that holds NaN or Inf reads back as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import fold, shape_of, unfold
from .numbers import one_nan
from .spec import Format, QuantizedTensor, StoredPart

_ZERO = 8
_PER_WORD = 8


@dataclass(frozen=True)
class Int4Format(Format):
    """`int4_g<group>/<rule>`."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return (
            StoredPart(suffix="weight_packed", dtype=torch.int32, tile=(1, _PER_WORD), content="codes"),
            StoredPart(suffix="weight_scale", dtype=torch.bfloat16, tile=self.block, content="scale"),
            StoredPart(suffix="weight_shape", dtype=torch.int32, tile=None, whole_shape=(2,), content="shape"),
        )

    @property
    def block(self) -> tuple[int, int]:
        return 1, int(self.name.layout)

    def scale_before_rounding(self, weight: torch.Tensor) -> torch.Tensor:
        """[N, groups]: the scale that the codes are computed with, float32 (`ct`: of the type of the weight)."""
        if self.name.rule == "ct":
            amax = fold(weight, self.block).abs().amax(dim=(1, 3))
            scale = torch.div(amax, torch.full_like(amax, 7.5))
            return torch.where(scale == 0, torch.full_like(scale, torch.finfo(scale.dtype).eps), scale)
        amax = fold(weight.float(), self.block).abs().amax(dim=(1, 3))
        return (amax * torch.tensor(1.0 / 7.0, dtype=torch.float32, device=amax.device)).clamp(min=1e-5)

    def quantize_in_torch(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        del amax
        scale = self.scale_before_rounding(weight)
        low, high = (-8, 7) if self.name.rule == "ct" else (-7, 7)
        quotient = torch.div(fold(weight.to(scale.dtype), self.block), scale[:, None, :, None])
        codes = quotient.round().clamp(low, high).nan_to_num(nan=0.0)
        return QuantizedTensor(
            codes=_pack_words(unfold(codes, weight.shape)),
            scale=one_nan(scale.to(torch.bfloat16)),
            shape=shape_of(weight),
        )

    def dequantize_in_torch(self, quantized: QuantizedTensor) -> torch.Tensor:
        values = fold(_unpack_words(quantized.codes, quantized.shape[1]).float(), self.block)
        return unfold(values * quantized.scale.float()[:, None, :, None], quantized.shape)


def _pack_words(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] values -8 to 7 -> [N, ceil(K / 8)] int32; what pads the last word is 0 as a value."""
    nibbles = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _PER_WORD)).to(torch.int32) + _ZERO
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    # Nibbles do not overlap, so the wrapping int32 sum is their union.
    return (nibbles.unflatten(1, (-1, _PER_WORD)) << shifts).sum(dim=-1, dtype=torch.int32)


def _unpack_words(words: torch.Tensor, columns: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts & 15) - _ZERO).flatten(1)[:, :columns]
