"""The compiled kernels as ctypes functions, or the reason why there are none."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Generator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from ..errors import WeightSyncError
from .build import LIBRARY, sources_digest

_FOLDER = Path(__file__).parent
_log = logging.getLogger("miles_weightsync")

STREAM_FIELDS = ("gaps", "lows", "longs", "steps", "bytes", "escapes")


class Writer(Structure):
    """`struct Writer` of kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in STREAM_FIELDS),
        *((f"num_{name}", c_int64) for name in STREAM_FIELDS),
        ("next", c_uint64),
        ("elements", c_uint64),
        ("changes", c_int64),
        ("is_wide", c_int64),
        ("pending", c_int64),
    ]  # fmt: skip


class Reader(Structure):
    """`struct Reader` of kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in STREAM_FIELDS),
        *((f"num_{name}", c_int64) for name in ("gaps", "longs", "bytes", "escapes")),
        ("changes", c_int64),
        ("is_wide", c_int64),
        ("limit", c_uint64),
    ]  # fmt: skip


class Rows(Structure):
    """`struct Rows` of kernels.h."""

    _fields_ = [("columns", c_int64), ("stride", c_int64)]


_FLOORS, _WRITERS, _WITNESS = POINTER(c_uint32), POINTER(Writer), POINTER(c_uint64)


class Kernels(Structure):
    """`struct Kernels` of kernels.h."""

    _fields_ = [
        ("find", CFUNCTYPE(c_int64, c_int, c_void_p, c_void_p, c_int64, c_uint64, _FLOORS, c_int, _WRITERS, _WITNESS)),
        ("pack", CFUNCTYPE(None, c_int, c_void_p, c_void_p, c_int64, _WRITERS)),
        ("unpack", CFUNCTYPE(c_int, c_int, POINTER(Reader), c_void_p, c_void_p)),
        ("locate", CFUNCTYPE(c_int, c_int, c_void_p, c_uint64, _FLOORS, c_int, *[c_void_p] * 6)),
        ("patch", CFUNCTYPE(c_int, c_int, *[c_void_p] * 2, c_int, c_void_p, c_int64, c_uint64, Rows, c_int, _WITNESS)),
        ("patch_track", CFUNCTYPE(c_int, c_int, c_void_p, POINTER(Reader), Rows, _WITNESS)),
    ]  # fmt: skip


_forced: list[str] = []


def find_kernels() -> Kernels | None:
    """The table for this machine; None where numpy has to do it, which is said once."""
    if _forced:
        return None if _forced[-1] == "numpy" else _table(_forced[-1])
    return _table("")


@contextmanager
def using(isa: str) -> Generator[None]:
    """Within the block: `avx512`, `avx2`, `portable`, or `numpy` for no kernels at all. Of the whole process.

    Raises:
        WeightSyncError: the library is not there, or the machine does not run that instruction set.
    """
    if isa != "numpy" and _table(isa) is None:
        raise WeightSyncError(f"There are no kernels for {isa} here: {_reason() or 'the machine does not run it'}.")
    _forced.append(isa)
    try:
        yield
    finally:
        _forced.pop()


def instruction_set() -> str:
    """What runs here: `avx512`, `avx2`, `portable` or `numpy`."""
    if _forced:
        return _forced[-1]
    return next((isa for isa in ("avx512", "avx2", "portable") if _table(isa) is not None), "numpy")


@cache
def _table(isa: str) -> Kernels | None:
    library = _load()
    if library is None:
        return None
    library.mw_kernels.restype, library.mw_kernels.argtypes = POINTER(Kernels), [c_char_p]
    found = library.mw_kernels(isa.encode())
    return found.contents if found else None


@cache
def _load() -> ctypes.CDLL | None:
    reason = _reason()
    if reason is None:
        return ctypes.CDLL(str(_FOLDER / LIBRARY))
    _log.warning(
        "miles-weightsync: %s. Deltas are made and put on by numpy: the same bytes, five to forty times slower. "
        "With a C++ compiler, build the kernels by `python -m %s.build`.",
        reason,
        __package__,
    )
    return None


@cache
def _reason() -> str | None:
    path = _FOLDER / LIBRARY
    if not path.exists():
        return "the CPU kernels are not built"
    try:
        library = ctypes.CDLL(str(path))
        library.mw_sources.restype = c_char_p
        sources = library.mw_sources().decode()
    except (OSError, AttributeError) as error:
        return f"{path} does not load ({error})"
    return None if sources == sources_digest(_FOLDER) else f"{path} was built from other sources"
