"""Calls the compiled kernels: the same bytes as the torch code of each format, or None where there is no kernel.

Kernels take whole blocks of contiguous bfloat16 or float32 on the CPU, for the rules that engines use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_float
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch

from . import triton_kernels
from .library import FP8_RULES, MX_RULES, find_kernels

if TYPE_CHECKING:
    from ..formats.nvfp4 import Nvfp4Format
    from ..formats.spec import Format, QuantizedTensor

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
            return _nvfp4(kernels, cast("Nvfp4Format", format), weight, amax)
        case "int4" if format.name.rule == "miles":
            return _int4(kernels, format, weight)
        case "mxfp8" | "mxfp4":
            return _mx(kernels, format, weight)
        case _:
            return None


def dequantize(format: Format, quantized: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The values of `quantized` in `dtype`, or None."""
    if dtype not in (torch.bfloat16, torch.float32) or quantized.codes.device.type != "cpu":
        return None
    kernels = find_kernels()
    rows, columns = quantized.shape
    if kernels is None or not _whole_blocks(format, columns) or rows * columns == 0:
        return None
    out = torch.empty(rows, columns, dtype=dtype)
    height, width = format.block[0] or rows, format.block[1] or columns
    where = quantized.codes.contiguous(), quantized.scale.contiguous(), out, _is_bf16(out)
    match format.name.family:
        case "fp8":
            _in_threads(kernels.fp8_dequantize, out.shape, *where, _Each(1), columns, height, width, unit=height)
        case "nvfp4":
            above = torch.ones(1) if quantized.global_scale is None else quantized.global_scale.contiguous()
            step = int(above.numel() > 1)
            _in_threads(kernels.nvfp4_dequantize, out.shape, *where, _Each(1), columns, above, step)
        case "int4":
            _in_threads(kernels.int4_dequantize, out.shape, *where, _Each(columns // width), width)
        case family:
            _in_threads(kernels.mx_dequantize, out.shape, *where, _Each(columns // width), int(family == "mxfp8"))
    return out


def row_amax(weight: torch.Tensor) -> torch.Tensor | None:
    """[N] float32, the largest magnitude of every row of a matrix [N, K]; or None."""
    kernels = find_kernels() if _takes(weight) and weight.shape[1] % 16 == 0 else None
    if kernels is None:
        return None
    weight, amax = weight.contiguous(), torch.empty(len(weight))
    _in_threads(kernels.row_amax, weight.shape, weight, _is_bf16(weight), amax, _Each(1), weight.shape[1])
    return amax


def _fp8(kernels: Any, format: Format, weight: torch.Tensor, amax: torch.Tensor | None) -> Parts:
    rows, columns = weight.shape
    height, width = format.block[0] or rows, format.block[1] or columns
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale, whole = torch.empty(format.grid((rows, columns))), None
    if amax is not None:
        # Rows are independent once the maximum is known; each writes the one scale.
        height, scale, whole = 1, torch.empty(rows, 1), byref(c_float(float(amax)))
    where, rule = (weight, _is_bf16(weight), codes, scale, _Each(1)), FP8_RULES[format.name.rule]
    _in_threads(kernels.fp8_quantize, weight.shape, *where, columns, height, width, rule, whole, unit=height)
    return codes, scale if amax is None else scale[:1].clone(), None


def _mx(kernels: Any, format: Format, weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    is_fp8 = format.name.family == "mxfp8"
    kind = torch.float8_e4m3fn if is_fp8 else torch.uint8
    codes = torch.empty(rows, columns if is_fp8 else columns // 2, dtype=kind)
    scale = torch.empty(rows, columns // 32, dtype=torch.uint8)
    where = weight, _is_bf16(weight), codes, scale, _Each(columns // 32)
    _in_threads(kernels.mx_quantize, weight.shape, *where, int(is_fp8), MX_RULES[format.name.rule])
    return codes, scale, None


def _nvfp4(kernels: Any, format: Nvfp4Format, weight: torch.Tensor, amax: torch.Tensor | None) -> Parts:
    rows, columns = weight.shape
    amax = row_amax(weight) if amax is None else amax
    assert amax is not None, "rows whose blocks are whole have a maximum"
    amax, rule = amax.reshape(-1), format.name.rule
    multiplier, decode = format.global_scales(amax)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn)
    where = weight, _is_bf16(weight), codes, scale, _Each(1), columns, multiplier, decode
    step = int(decode.numel() > 1)
    if "4o6" in rule:
        _in_threads(kernels.nvfp4_4o6_quantize, weight.shape, *where, amax, step, int(rule.endswith("MSE")))
    else:
        _in_threads(kernels.nvfp4_quantize, weight.shape, *where, step)
    return codes, scale, decode


def _int4(kernels: Any, format: Format, weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    group = format.block[1]
    codes = torch.empty(rows, columns // 8, dtype=torch.int32)
    scale = torch.empty(rows, columns // group, dtype=torch.bfloat16)
    where = weight, _is_bf16(weight), codes, scale, _Each(columns // group)
    _in_threads(kernels.int4_quantize, weight.shape, *where, group)
    return codes, scale, None


def _takes(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32) and weight.numel() > 0


def _whole_blocks(format: Format, columns: int) -> bool:
    width = format.block[1] or columns
    return width % 16 == 0 and columns % width == 0


def _is_bf16(tensor: torch.Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


class _Each(int):
    """An argument of a kernel: so many units of work for each row that a thread is given."""


def _in_threads(kernel: Callable[..., None], shape: Sequence[int], *arguments: object, unit: int = 1) -> None:
    """Call `kernel` on all rows of a matrix of `shape`, cut at multiples of `unit` among the threads that torch uses.

    Each call gets the address of its first row for every tensor among the arguments, and the amount of its work for an
    `_Each`. A tensor may have one row for every `unit` rows of the matrix, or a single one for all.
    """
    rows, columns = shape
    wanted = max(1, min(torch.get_num_threads(), rows * columns // _PER_THREAD, -(-rows // unit)))
    step = -(-rows // unit // wanted) * unit

    def work(first: int) -> None:
        def passed(argument: object) -> object:
            match argument:
                case torch.Tensor():
                    row = first * len(argument) // rows
                    return argument.data_ptr() + row * argument.stride(0) * argument.element_size()
                case _Each():
                    return argument * (min(first + step, rows) - first)
                case _:
                    return argument

        kernel(*map(passed, arguments))

    if wanted == 1:
        work(0)
    else:
        list(_pool().map(work, range(0, rows, step)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="miles-quant")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child inherits the pool and none of its threads
