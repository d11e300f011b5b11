"""MXFP8 and FP8 in rows of 128 on a GPU: one pass over memory, the same bytes as the torch code of the formats.

Before its first use on a device each kernel is compared with that code on a matrix of edges; where a byte differs,
torch keeps doing the work, and that is said once.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .library import FP8_RULES

if TYPE_CHECKING:
    from ..formats.spec import Format


def _module(name: str) -> Any:
    """None where there is no Triton; the CUDA build of torch brings it."""
    try:
        return import_module(name)
    except ImportError:
        return None


triton, tl = _module("triton"), _module("triton.language")
jit: Callable[..., Any] = triton.jit if triton else lambda function: function

_BLOCKS_PER_PROGRAM = 16
_log = logging.getLogger("miles_quant")


def quantize(format: Format, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales of a matrix on a GPU, or None where torch has to do it."""
    if triton is None or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    name, width = str(format.name), format.block[1]
    if name != "mxfp8/rceil" and not (format.name.family == "fp8" and format.block == (1, 128)):
        return None
    if weight.shape[1] % width or not _is_equal(format, weight.device, weight.dtype):
        return None
    return _launch(format, weight)


@cache
def _is_equal(format: Format, device: torch.device, dtype: torch.dtype) -> bool:
    """Does the kernel give the format's bytes on a matrix of edges, on this device?"""
    probe = edges(dtype).to(device)
    codes, scale = _launch(format, probe)
    expected = format.quantize_in_torch(probe, None)
    pairs = ((codes, expected.codes), (scale, expected.scale))
    if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        return True
    _log.warning(
        "miles-quant: the Triton kernel of %s differs from the format on %s; torch does it", format.name, device
    )
    return False


def edges(dtype: torch.dtype) -> torch.Tensor:
    """[512, 256]: every size from denormals to the largest, ties, zeros, NaN and Inf, all signs."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(512, 256, generator=generator) * torch.exp2(torch.linspace(-149, 127, 512))[:, None]
    values[:64] = torch.randint(-64, 65, (64, 256), generator=generator) / 8
    values[64:128, 0] = 448.0 * torch.exp2(torch.arange(-32.0, 32.0))
    values[128:192] = 0.0
    values[128:160, ::3] = -0.0
    values[200, 7], values[201, 130], values[202, 255] = torch.nan, torch.inf, -torch.inf
    return values.to(dtype)


def _launch(format: Format, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = weight.contiguous()
    (rows, columns), width = weight.shape, format.block[1]
    blocks = rows * columns // width
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    is_mx = format.name.family == "mxfp8"
    kind = torch.uint8 if is_mx else torch.float32
    scale = torch.empty(rows, columns // width, dtype=kind, device=weight.device)
    grid = (-(-blocks // _BLOCKS_PER_PROGRAM),)
    kernel: Any = _mxfp8 if is_mx else _fp8
    rule = {} if is_mx else {"RULE": FP8_RULES[format.name.rule]}
    kernel[grid](
        weight, codes, scale, blocks, BLOCKS=_BLOCKS_PER_PROGRAM, WIDTH=width, **rule, enable_fp_fusion=False
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scale


@jit
def _e4m3(value):
    # As in vectors.h: NaN 0x7F, saturating, ties to even.
    value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@jit
def _block_of(x, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None].to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (block < blocks)[:, None]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # Magnitudes order as integers do, with NaN above all of them.
    amax = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    return block, at, inside, value, amax


@jit
def _mxfp8(x, codes, scales, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    block, at, inside, value, amax = _block_of(x, blocks, BLOCKS, WIDTH)
    ratio = (amax.to(tl.float32, bitcast=True) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
    up = tl.where(exponent == 0, mantissa > 0x400000, (mantissa > 0) & (exponent < 254))
    exponent = exponent + up.to(tl.int32)
    exponent = tl.where(amax == 0x7F800000, 254, exponent)
    exponent = tl.where(amax > 0x7F800000, 255, exponent)
    inverse = 254 - exponent
    bits = tl.where(inverse == 0, 0x00400000, inverse << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    tl.store(codes + at, _e4m3(value * bits.to(tl.float32, bitcast=True)[:, None]), mask=inside)
    tl.store(scales + block, exponent.to(tl.uint8), mask=block < blocks)


@jit
def _fp8(x, codes, scales, blocks, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, RULE: tl.constexpr):
    block, at, inside, value, bits = _block_of(x, blocks, BLOCKS, WIDTH)
    is_nan = bits > 0x7F800000
    amax = bits.to(tl.float32, bitcast=True)
    one, top = amax * 0.0 + 1.0, amax * 0.0 + 448.0
    one, top = tl.where(is_nan | (bits == 0x7F800000), 1.0, one), tl.where(is_nan | (bits == 0x7F800000), 448.0, top)
    if RULE == 0:
        stored = tl.math.div_rn(amax, top)
        stored = tl.where(stored == 0.0, 1.0, stored)
        scaled = tl.math.div_rn(value, tl.broadcast_to(stored[:, None], value.shape))
    elif RULE == 1:
        stored = tl.math.div_rn(tl.where(amax < 1e-10, 1e-10, amax), top)
        scaled = value * tl.math.div_rn(one, stored)[:, None]
    else:
        encode = tl.math.div_rn(top, amax)
        encode = tl.where(encode > 3.4028234663852886e38, 3.4028234663852886e38, encode)
        if RULE == 3:
            encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        encode = tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
        stored = tl.math.div_rn(one, encode)
        scaled = value * encode[:, None]
    stored = tl.where(is_nan, float("nan"), stored)
    scaled = tl.where(is_nan[:, None], float("nan"), scaled)
    tl.store(codes + at, _e4m3(scaled), mask=inside)
    tl.store(scales + block, stored, mask=block < blocks)
