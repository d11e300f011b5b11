"""NVFP4: blocks of 16 along a row with an E4M3 scale each, one float32 scale above them, E2M1 codes.

    te        S = min(2688 / gamax, FLT_MAX) (1 if that is 0),  g = 1 / S
              s = e4m3(amax * (S * fp32(1/6))),  codes = e2m1(x * min(1 / (s * g), FLT_MAX))    (Transformer Engine)
    te_row    the same with one gamax a row: a token's codes never depend on its batch
    te_4o6    S from 1536; b = amax / 6 * S gives two candidates, s = e4m3(b) whose largest code is 6 and
              s = e4m3(1.5 b) whose largest is 4; the second where its summed error is smaller, errors being
              |code * s * gamax / 1536 - x| (MAE) or their squares (MSE), added in order in float32   (arXiv:2512.02010)
    modelopt  g = gamax / 2688,  s = e4m3(amax / (6 g)) within [2^-9, 448], 1 for a block of zeros,
              codes = e2m1(x / (s * g))                                                              (NVIDIA ModelOpt)
    torchao2  as modelopt with s = e4m3(amax / 6 / g) within [2^-6, 448] and codes = e2m1(x * (1 / g / s))    (torchao)
    1level    s = e4m3(amax / 6) within [2^-6, 448], no scale above: codes = e2m1(x * (1 / s))                (torchao)

A value is code * (s * g). The sign of a value that rounds to zero is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .blocks import fold, shape_of, unfold
from .numbers import (
    E2M1_MAX,
    E4M3_MAX,
    FLOAT_MAX,
    divide,
    from_e2m1,
    one_nan,
    pack_nibbles,
    to_e2m1,
    to_e4m3,
    unpack_nibbles,
)
from .spec import Format, QuantizedTensor, StoredPart

_BLOCK = 16
_TOP_4O6 = 256.0  # leaves room in E4M3 for a scale that is 1.5 times as large


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """`nvfp4/<rule>`."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        tile = None if self.name.has_tensor_scale else (1, 0)
        above = StoredPart(suffix="weight_scale_2", dtype=torch.float32, tile=tile, content="global_scale")
        return (
            StoredPart(suffix="weight", dtype=torch.uint8, tile=(1, 2), content="codes"),
            StoredPart(suffix="weight_scale", dtype=torch.float8_e4m3fn, tile=self.block, content="scale"),
            *(() if self.name.rule == "1level" else (above,)),
            # Activations are scaled by their own values, so the static scale that loaders ask for is 1.
            StoredPart(suffix="input_scale", dtype=torch.float32, tile=None, content="one"),
        )

    @property
    def block(self) -> tuple[int, int]:
        return 1, _BLOCK

    @property
    def activation(self) -> Format:
        return Nvfp4Format(replace(self.name, rule=self.name.rule if self._per_row else _ROW_RULE[self.name.rule]))

    def global_scales(self, gamax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the rules `te`: S by which block maxima (4o6: a sixth of them) become scales, and g above all blocks."""
        if "4o6" in self.name.rule:
            return _global_scales(gamax, _TOP_4O6)
        encode, decode = _global_scales(gamax, E4M3_MAX)
        return encode * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=gamax.device), decode

    @property
    def _per_row(self) -> bool:
        return self.name.rule.startswith("te_row")

    def quantize_in_torch(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        blocks = fold(weight.float(), self.block)[:, 0]
        amax_of_block = blocks.abs().amax(dim=-1)
        if amax is None:  # one a row: for rules without a scale above the blocks, it is not read
            amax = amax_of_block.amax(dim=1)
        gamax = amax.reshape(-1, 1)
        match self.name.rule:
            case "modelopt":
                codes, scale, above = _modelopt(blocks, amax_of_block, gamax)
            case "torchao2":
                codes, scale, above = _torchao2(blocks, amax_of_block, gamax)
            case "1level":
                codes, scale, above = _one_level(blocks, amax_of_block)
            case rule if "4o6" in rule:
                scales = self.global_scales(gamax)
                codes, scale, above = _four_over_six(blocks, amax_of_block, gamax, scales, squared=rule.endswith("MSE"))
            case _:
                multiplier, above = self.global_scales(gamax)
                scale = to_e4m3(amax_of_block * multiplier)
                codes = _encode(blocks, scale, above)
        return QuantizedTensor(
            codes=pack_nibbles(codes.flatten(1)[:, : weight.shape[1]]),
            scale=scale,
            global_scale=None if above is None else above.flatten(),
            shape=shape_of(weight),
        )

    def dequantize_in_torch(self, quantized: QuantizedTensor) -> torch.Tensor:
        scale = quantized.scale.float()
        if quantized.global_scale is not None:
            scale = scale * quantized.global_scale.reshape(-1, 1)
        values = fold(from_e2m1(unpack_nibbles(quantized.codes, quantized.shape[1])), self.block)
        return unfold(values * scale[:, None, :, None], quantized.shape)


_ROW_RULE = {
    "te": "te_row",
    "te_4o6_MSE": "te_row_4o6_MSE",
    "te_4o6_MAE": "te_row_4o6_MAE",
    "modelopt": "te_row",  # engines quantise activations as Transformer Engine does, whoever made the weights
    "torchao2": "te_row",
    "1level": "1level",
}

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [N, blocks, 16], E4M3 scales [N, blocks], scale above [1 or N, 1]."""


def _four_over_six(
    blocks: torch.Tensor,
    amax: torch.Tensor,
    gamax: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    *,
    squared: bool,
) -> _Parts:
    encode, decode = scales
    base = torch.div(amax, torch.full_like(amax, E2M1_MAX)) * encode
    six, four = to_e4m3(base), to_e4m3(base * 1.5)
    codes_six, codes_four = _encode(blocks, six, decode), _encode(blocks, four, decode)

    def error(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = from_e2m1(codes) * scale.float()[..., None] * gamax[..., None]
        distance = torch.div(values, torch.full_like(values, E2M1_MAX * _TOP_4O6)) - blocks
        distance = distance * distance if squared else distance.abs()
        total = torch.zeros_like(amax)
        for column in range(_BLOCK):  # in order: the sum rounds at every step
            total = total + distance[..., column]
        return total

    picks_four = error(codes_four, four) < error(codes_six, six)
    scale = torch.where(picks_four, four.view(torch.uint8), six.view(torch.uint8)).view(torch.float8_e4m3fn)
    return torch.where(picks_four[..., None], codes_four, codes_six), scale, decode


def _modelopt(blocks: torch.Tensor, amax: torch.Tensor, gamax: torch.Tensor) -> _Parts:
    above = _decode_scale(gamax)
    ratio = torch.div(amax, above * E2M1_MAX)
    ratio = torch.where(ratio == 0, torch.ones_like(ratio), ratio)
    scale = to_e4m3(ratio.clamp(min=2.0**-9))
    return to_e2m1(torch.div(blocks, (scale.float() * above)[..., None])), scale, above


def _torchao2(blocks: torch.Tensor, amax: torch.Tensor, gamax: torch.Tensor) -> _Parts:
    above = _decode_scale(gamax)
    scale = to_e4m3(torch.div(torch.div(amax, torch.full_like(amax, E2M1_MAX)), above).clamp(min=2.0**-6))
    return to_e2m1(blocks * torch.div(divide(1.0, above), scale.float())[..., None]), scale, above


def _one_level(blocks: torch.Tensor, amax: torch.Tensor) -> _Parts:
    scale = to_e4m3(torch.div(amax, torch.full_like(amax, E2M1_MAX)).clamp(min=2.0**-6))
    return to_e2m1(blocks * divide(1.0, scale.float())[..., None]), scale, None


def _global_scales(gamax: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    encode = divide(E2M1_MAX * top, one_nan(gamax)).clamp(max=FLOAT_MAX)
    encode = torch.where(encode == 0, torch.ones_like(encode), encode)
    return encode, divide(1.0, encode)


def _decode_scale(gamax: torch.Tensor) -> torch.Tensor:
    """gamax / 2688; 1 where that is 0, for which ModelOpt and torchao themselves give NaN."""
    scale = torch.div(one_nan(gamax), torch.full_like(gamax, E2M1_MAX * E4M3_MAX))
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _encode(blocks: torch.Tensor, scale: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
    factor = divide(1.0, scale.float() * decode).clamp(max=FLOAT_MAX)
    return to_e2m1(blocks * factor[..., None])
