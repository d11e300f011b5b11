"""Products of codes on tensor cores, through `torch.nn.functional.scaled_mm`. Not run on a GPU yet.

    FP8, one scale a tensor or row         compute capability 8.9 or later
    FP8, 1x128 times 128x128 or 1x128      9.0, where cuBLAS has them
    MXFP8, NVFP4                           10.0 or later; scales swizzled, NVFP4's outer scales multiplied in afterwards

Before a kind of product is used on a device, it is compared there with the emulation. Where it differs, or torch
refuses it, the emulation is used instead, which is logged once.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from ..formats.spec import Format, QuantizedTensor
from ..formats.swizzle import swizzle_scales

TOLERANCE = 2.0**-6
"""Of the largest value. Tensor cores sum in fewer bits than float32, and results may be bfloat16."""

Formats = tuple[Format, Format]
"""Of the two operands."""
_ALIGNED = 16
_log = logging.getLogger("miles_quant")


def product(a: QuantizedTensor, b: QuantizedTensor, formats: Formats, *, dtype: torch.dtype) -> torch.Tensor | None:
    """[M, N] = a b^T in `dtype` for a [M, K], b [N, K]; None where the emulation has to do it."""
    device = a.codes.device
    if device.type != "cuda" or b.shape[0] % _ALIGNED or a.shape[1] % _ALIGNED:
        return None
    if not _is_capable(formats[1], torch.cuda.get_device_capability(device)):
        return None
    return multiply(a, b, formats, dtype=dtype) if _agrees(formats, device, dtype) else None


def multiply(a: QuantizedTensor, b: QuantizedTensor, formats: Formats, *, dtype: torch.dtype) -> torch.Tensor:
    """The same, whatever the device; torch raises where it cannot."""
    swizzle, out, family = SwizzleType.NO_SWIZZLE, dtype, formats[1].name.family
    if family in ("mxfp8", "nvfp4"):
        is_mx, swizzle = family == "mxfp8", SwizzleType.SWIZZLE_32_4_4
        kind = torch.float8_e8m0fnu if is_mx else torch.float8_e4m3fn
        a_scale, b_scale = (swizzle_scales(operand.scale).view(kind) for operand in (a, b))
        a_kind = b_kind = ScalingType.BlockWise1x32 if is_mx else ScalingType.BlockWise1x16
        out = dtype if is_mx else torch.float32
    elif 0 in formats[1].block:
        a_scale = a.scale.expand(a.shape[0], 1).contiguous()
        b_scale = b.scale.reshape(1, -1).expand(1, b.shape[0]).contiguous()
        a_kind = b_kind = ScalingType.RowWise
    else:
        # Float32 scales of blocks: cuBLAS wants the outer dimension contiguous; of 128x128, K first and in fours.
        a_scale, a_kind = a.scale.t().contiguous().t(), ScalingType.BlockWise1x128
        if formats[1].block == (1, 128):
            b_scale, b_kind = b.scale.t().contiguous().t(), ScalingType.BlockWise1x128
        else:
            b_scale = functional.pad(b.scale, (0, -b.scale.shape[1] % 4)).t()
            b_kind = ScalingType.BlockWise128x128
        out = torch.bfloat16
    a_codes, b_codes = _typed(a.codes), _typed(b.codes).t()
    y = functional.scaled_mm(
        a_codes, b_codes, a_scale, a_kind, b_scale, b_kind, swizzle, swizzle, output_dtype=out
    )  # fmt: skip
    for scale, shape in ((a.global_scale, (-1, 1)), (b.global_scale, (1, -1))):
        y = y if scale is None else y * scale.reshape(shape)
    return y.to(dtype)


def _typed(codes: torch.Tensor) -> torch.Tensor:
    """FP8 as it is, pairs of FP4 under their type."""
    return codes.contiguous() if codes.dtype == torch.float8_e4m3fn else codes.view(torch.float4_e2m1fn_x2)


def _is_capable(weight: Format, capability: tuple[int, int]) -> bool:
    match weight.name.family:
        case "mxfp8" | "nvfp4":
            return capability >= (10, 0)
        case "fp8" if 0 in weight.block:
            return capability >= (8, 9)
        case "fp8":
            return capability[0] == 9 and weight.block in ((1, 128), (128, 128))
        case _:
            return False


@cache
def _agrees(formats: Formats, device: torch.device, dtype: torch.dtype) -> bool:
    """Does the product equal the emulated one on this device, but for the order of its sums?"""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        format.quantize(torch.randn(rows, 512, generator=generator).to(device))
        for format, rows in zip(formats, (160, 384), strict=True)
    )
    expected = emulated(a, b, formats)
    try:
        error = (multiply(a, b, formats, dtype=dtype).float() - expected).abs().max() / expected.abs().max()
    except (RuntimeError, ValueError) as refusal:
        why = str(refusal).splitlines()[0]
    else:
        if error <= TOLERANCE:
            return True
        why = f"it differs from the emulation by {float(error):.1e} of the largest value"
    _log.warning("miles-quant: products of %s are emulated on %s: %s", formats[1].name, device, why)
    return False


def emulated(a: QuantizedTensor, b: QuantizedTensor, formats: Formats) -> torch.Tensor:
    """What a product has to be, in float32."""
    return functional.linear(*(f.dequantize(q, dtype=torch.float32) for f, q in zip(formats, (a, b), strict=True)))
