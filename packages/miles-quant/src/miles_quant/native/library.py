"""The compiled kernels as ctypes functions, or the reason why there are none."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from ..errors import QuantError
from .build import LIBRARY, sources_digest

FP8_RULES = {"div": 0, "miles": 1, "te": 2, "te_pow2": 3}
MX_RULES = {"rceil": 0, "floor": 1, "even": 2}
"""The numbers that kernels know scale rules by."""
_FOLDER = Path(__file__).parent
_log = logging.getLogger("miles_quant")


class Kernels(ctypes.Structure):
    """The functions of the compiled library for one instruction set: `struct Kernels` of kernels.h."""

    _fields_ = [
        ("row_amax", CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_int64, c_int64)),
        ("mx_quantize", CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int, c_int)),
        ("mx_dequantize", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int)),
        ("fp8_quantize", CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p, *[c_int64] * 4, c_int, POINTER(c_float))),
        ("fp8_dequantize", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int, *[c_int64] * 4)),
        (
            "nvfp4_quantize",
            CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
        ),
        (
            "nvfp4_4o6_quantize",
            CFUNCTYPE(None, c_void_p, c_int, *[c_void_p] * 2, c_int64, c_int64, *[c_void_p] * 3, c_int64, c_int),
        ),
        ("nvfp4_dequantize", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64, c_void_p, c_int64)),
        ("int4_quantize", CFUNCTYPE(None, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64)),
        ("int4_dequantize", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int64)),
    ]  # fmt: skip


_forced: list[str] = []


def find_kernels() -> Kernels | None:
    """The functions for this machine; None where torch computes formats instead, which is logged once."""
    if _forced:
        return None if _forced[-1] == "torch" else _table(_forced[-1])
    return _table("")


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Use the kernels of one instruction set within a `with` block, in the whole process; for tests and benchmarks.

    Args:
        isa: `avx512`, `avx2`, `portable`, or `torch` for no kernels at all.

    Raises:
        QuantError: the library is not there, or the machine does not run that instruction set.
    """
    if isa != "torch" and _table(isa) is None:
        raise QuantError(f"There are no kernels for {isa} here: {_library()[1] or 'the machine does not run it'}.")
    _forced.append(isa)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _table(isa: str) -> Kernels | None:
    library, _ = _library()
    found = library.mq_kernels(isa.encode()) if library else None
    return found.contents if found else None


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why it cannot be used, which is logged."""
    path, reason = _FOLDER / LIBRARY, "the CPU kernels are not built"
    if path.exists():
        try:
            library = ctypes.CDLL(str(path))
            library.mq_sources.restype = c_char_p
            library.mq_kernels.restype, library.mq_kernels.argtypes = POINTER(Kernels), [c_char_p]
            if library.mq_sources().decode() == sources_digest(_FOLDER):
                return library, ""
            reason = f"{path} was built from other sources"
        except (OSError, AttributeError) as error:
            reason = f"{path} does not load ({error})"
    _log.warning(
        "miles-quant: %s. Formats are computed by torch: the same bytes, ten to a hundred times slower on a CPU. "
        "With a C++ compiler, build the kernels by `python -m %s.build`.",
        reason,
        __package__,
    )
    return None, reason
