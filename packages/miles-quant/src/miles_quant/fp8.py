"""FP8 (E4M3) with float32 scales per tensor, per 1x128 row block or per 128x128 tile: one spec for every use.

Three published rules for the scale differ in the last bit, so a contract has to name one:

    div      s = amax / 448,                codes = x / s           (DeepSeek-V3, arXiv:2412.19437 §3.3)
    miles    s = max(amax, 1e-10) / 448,    codes = x * (1 / s)     (radixark/miles exporter)
    te       e = min(448 / amax, FLT_MAX),  codes = x * e, s = 1/e  (Transformer Engine)
    te_pow2  as te with the mantissa of e cut to a power of two     (Transformer Engine on Blackwell)

A block of zeros has scale 1 (`miles`: 1e-10 / 448). Arithmetic is float32, rounding to nearest even, saturating at
±448. NaN and Inf are refused: a weight that holds them is broken already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .blocks import check_quantizable, fold, unfold
from .errors import QuantError

E4M3_MAX = 448.0
Rule = Literal["div", "miles", "te", "te_pow2"]
RULES: tuple[Rule, ...] = ("div", "miles", "te", "te_pow2")


class QuantizedTensor(NamedTuple):
    """Codes and scales of one matrix, as they are stored."""

    codes: torch.Tensor
    """[N, K] float8_e4m3fn."""
    scale: torch.Tensor
    """[ceil(N / block rows), ceil(K / block columns)] float32; `codes * scale` is the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """An FP8 format: block shape and scale rule. `block=None` is one scale for the whole tensor."""

    block: tuple[int, int] | None = (128, 128)
    rule: Rule = "div"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise QuantError(f"Unknown FP8 scale rule {self.rule!r}; choose one of {', '.join(RULES)}.")
        if self.block is not None and min(self.block) < 1:
            raise QuantError(f"FP8 block {self.block} must have positive sides.")

    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        """Codes and scales of a float matrix [N, K]; edge blocks are padded with zeros.

        Raises:
            QuantError: not a floating matrix, or NaN or Inf in it (with the first index).
        """
        check_quantizable(weight)
        block = self.block or tuple(weight.shape)
        blocks = fold(weight.float(), block)
        amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        scaled, scale = _scale(blocks, amax, self.rule)
        codes = unfold(scaled.clamp(-E4M3_MAX, E4M3_MAX), weight.shape).to(torch.float8_e4m3fn)
        return QuantizedTensor(codes=codes, scale=scale[:, 0, :, 0].contiguous())

    def dequantize(self, quantized: QuantizedTensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The value [N, K] that an engine computes with."""
        codes, scale = quantized
        block = self.block or tuple(codes.shape)
        expected = tuple(-(-n // b) for n, b in zip(codes.shape, block, strict=True))
        if tuple(scale.shape) != expected:
            raise QuantError(
                f"Scale of shape {tuple(scale.shape)} for codes {tuple(codes.shape)}; expected {expected}."
            )
        return unfold(fold(codes.float(), block) * scale[:, None, :, None], codes.shape).to(dtype)

    def fake_quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """`dequantize(quantize(weight))` in the type of `weight`: the trainer's view of what the engine will hold."""
        return self.dequantize(self.quantize(weight), dtype=weight.dtype)


def _scale(blocks: torch.Tensor, amax: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled blocks and stored scales. Tensor-by-tensor division throughout: torch turns scalar / tensor into a
    multiplication by the reciprocal, which is off by one ulp in a quarter of the cases."""
    top = torch.full_like(amax, E4M3_MAX)
    one = torch.ones_like(amax)
    empty = amax == 0
    if rule == "div":
        scale = torch.where(empty, one, torch.div(amax, top))
        return torch.div(blocks, torch.where(scale == 0, one, scale)), scale
    if rule == "miles":
        scale = torch.div(amax.clamp(min=1e-10), top)
        return blocks * torch.div(one, scale), scale
    encode = torch.div(top, amax).clamp(max=torch.finfo(torch.float32).max)
    if rule == "te_pow2":
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(empty, one, encode)
    return blocks * encode, torch.div(one, encode)
