"""Formats through the compiled kernels: the same bytes as the torch code of each format, or None where they have none.

Kernels take whole blocks of contiguous bfloat16 or float32 on the CPU, for the rules that engines use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from . import triton_kernels
from .library import find_kernels

if TYPE_CHECKING:
    from ..formats.spec import Format, QuantizedTensor

_MX_RULES = {"rceil": 0, "floor": 1, "even": 2}
_FP8_RULES = {"div": 0, "miles": 1, "te": 2, "te_pow2": 3}
_PER_THREAD = 1 << 19  # elements: below this, handing work over takes longer than doing it

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scales, the scale above them."""


def quantize(format: Format, weight: torch.Tensor, amax: torch.Tensor | None) -> Parts | None:
    """What `format` makes of `weight`, or None."""
    if weight.device.type == "cuda":
        found = triton_kernels.quantize(format, weight)
        return None if found is None else (*found, None)
    if not _takes(weight) or not _whole_blocks(format, weight.shape[1]):
        return None
    kernels = find_kernels()
    if kernels is None:
        return None
    weight = weight.contiguous()
    match format.name.family:
        case "fp8":
            return _fp8(kernels, format, weight, amax)
        case "nvfp4" if format.name.rule.startswith("te"):
            return _nvfp4(kernels, format, weight, amax)
        case "int4" if format.name.rule == "miles":
            return _int4(kernels, format, weight)
        case "mxfp8" | "mxfp4":
            return _mx(kernels, format, weight)
        case _:
            return None


def dequantize(format: Format, quantized: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The values of `quantized` in `dtype`, or None."""
    codes, scale = quantized.codes, quantized.scale
    if dtype not in (torch.bfloat16, torch.float32) or codes.device.type != "cpu":
        return None
    kernels = find_kernels()
    rows, columns = quantized.shape
    if kernels is None or not _whole_blocks(format, columns) or rows * columns == 0:
        return None
    out = torch.empty(rows, columns, dtype=dtype)
    codes, scale, above = codes.contiguous(), scale.contiguous(), quantized.global_scale
    block_rows, block_columns = format.block[0] or rows, format.block[1] or columns
    is_bf16, family, unit = _is_bf16(out), format.name.family, 1
    match family:
        case "fp8":
            unit = block_rows

            def work(a: int, b: int) -> None:
                where = _at(codes, a), _at(scale, a // block_rows), _at(out, a)
                kernels.fp8_dequantize(*where, is_bf16, b - a, columns, block_rows, block_columns)
        case "nvfp4":
            above = (torch.ones(1) if above is None else above).contiguous()
            step = int(above.numel() > 1)

            def work(a: int, b: int) -> None:
                where = _at(codes, a), _at(scale, a), _at(out, a)
                kernels.nvfp4_dequantize(*where, is_bf16, b - a, columns, _at(above, a * step), step)
        case "int4":

            def work(a: int, b: int) -> None:
                groups = (b - a) * columns // block_columns
                kernels.int4_dequantize(_at(codes, a), _at(scale, a), _at(out, a), is_bf16, groups, block_columns)
        case _:

            def work(a: int, b: int) -> None:
                blocks = (b - a) * columns // block_columns
                where = _at(codes, a), _at(scale, a), _at(out, a)
                kernels.mx_dequantize(*where, is_bf16, blocks, int(family == "mxfp8"))

    _in_threads(work, rows, columns, unit)
    return out


def row_amax(weight: torch.Tensor) -> torch.Tensor | None:
    """[N] float32, the largest magnitude of every row of a matrix [N, K]; or None."""
    kernels = find_kernels() if _takes(weight) and weight.shape[1] % 16 == 0 else None
    if kernels is None:
        return None
    weight = weight.contiguous()
    rows, columns = weight.shape
    amax = torch.empty(rows)

    def work(a: int, b: int) -> None:
        kernels.row_amax(_at(weight, a), _is_bf16(weight), _at(amax, a), b - a, columns)

    _in_threads(work, rows, columns)
    return amax


def _fp8(kernels: Any, format: Format, weight: torch.Tensor, amax: torch.Tensor | None) -> Parts:
    rows, columns = weight.shape
    height, width = format.block[0] or rows, format.block[1] or columns
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(format.grid((rows, columns)))
    whole = None if amax is None else byref(c_float(float(amax)))
    if amax is not None:
        height = 1  # rows are independent once the maximum is known; each writes the one scale
        scale = torch.empty(rows, 1)

    def work(a: int, b: int) -> None:
        kernels.fp8_quantize(
            _at(weight, a),
            _is_bf16(weight),
            _at(codes, a),
            _at(scale, a // height),
            b - a,
            columns,
            height,
            width,
            _FP8_RULES[format.name.rule],
            whole,
        )

    _in_threads(work, rows, columns, height)
    return codes, scale if amax is None else scale[:1].clone(), None


def _mx(kernels: Any, format: Format, weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    is_fp8 = format.name.family == "mxfp8"
    kind = torch.float8_e4m3fn if is_fp8 else torch.uint8
    codes = torch.empty(rows, columns if is_fp8 else columns // 2, dtype=kind)
    scale = torch.empty(rows, columns // 32, dtype=torch.uint8)

    def work(a: int, b: int) -> None:
        kernels.mx_quantize(
            _at(weight, a),
            _is_bf16(weight),
            _at(codes, a),
            _at(scale, a),
            (b - a) * columns // 32,
            int(is_fp8),
            _MX_RULES[format.name.rule],
        )

    _in_threads(work, rows, columns)
    return codes, scale, None


def _nvfp4(kernels: Any, format: Format, weight: torch.Tensor, amax: torch.Tensor | None) -> Parts:
    from ..formats.nvfp4 import four_over_six_scales, transformer_engine_scales

    rows, columns = weight.shape
    if amax is None:
        amax = row_amax(weight)
        assert amax is not None, "rows whose blocks are whole have a maximum"
    amax, rule = amax.reshape(-1), format.name.rule
    multiplier, decode = (four_over_six_scales if "4o6" in rule else transformer_engine_scales)(amax)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn)
    step = int(decode.numel() > 1)

    def work(a: int, b: int) -> None:
        where = _at(weight, a), _is_bf16(weight), _at(codes, a), _at(scale, a), b - a, columns
        scales = _at(multiplier, a * step), _at(decode, a * step)
        if "4o6" in rule:
            kernels.nvfp4_4o6_quantize(*where, *scales, _at(amax, a * step), step, int(rule.endswith("MSE")))
        else:
            kernels.nvfp4_quantize(*where, *scales, step)

    _in_threads(work, rows, columns)
    return codes, scale, decode


def _int4(kernels: Any, format: Format, weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    group = format.block[1]
    codes = torch.empty(rows, columns // 8, dtype=torch.int32)
    scale = torch.empty(rows, columns // group, dtype=torch.bfloat16)

    def work(a: int, b: int) -> None:
        kernels.int4_quantize(
            _at(weight, a), _is_bf16(weight), _at(codes, a), _at(scale, a), (b - a) * columns // group, group
        )

    _in_threads(work, rows, columns)
    return codes, scale, None


def _takes(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32) and weight.numel() > 0


def _whole_blocks(format: Format, columns: int) -> bool:
    width = format.block[1] or columns
    return width % 16 == 0 and columns % width == 0


def _is_bf16(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def _at(tensor: torch.Tensor, row: int) -> int:
    """Address of a row."""
    return tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size()


def _in_threads(work: Callable[[int, int], None], rows: int, columns: int, unit: int = 1) -> None:
    """`work(first, last)` over all rows, cut at multiples of `unit` among as many threads as torch uses."""
    wanted = min(torch.get_num_threads(), rows * columns // _PER_THREAD, -(-rows // unit))
    if wanted < 2:
        work(0, rows)
        return
    step = -(-rows // unit // wanted) * unit
    list(_pool().map(lambda start: work(start, min(start + step, rows)), range(0, rows, step)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="miles-quant")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child inherits the pool and none of its threads
