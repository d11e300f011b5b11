"""Read-only numpy arrays of a fixed type, with errors that give the numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from miles_tito.errors import RecordError


def readonly(value: Any, dtype: Any, name: str, *, ndim: int, error: type[RecordError] = RecordError) -> np.ndarray:
    """`value` as a read-only array of `dtype` (None keeps its own); refuses casts that lose values.

    An array of the right type is viewed, not copied.
    """
    array = np.asarray(value)
    if array.ndim != ndim:
        raise error(f"`{name}` has {array.ndim} dimensions with shape {array.shape}; it must have {ndim}.")
    if dtype is not None and array.dtype != dtype:
        array = _cast(array, np.dtype(dtype), name, error)
    view = array.view()
    view.flags.writeable = False
    return view


def per_token(value: Any, dtype: Any, name: str, length: int, *, error: type[RecordError] = RecordError) -> np.ndarray:
    """A read-only 1-D array with one entry for each of `length` tokens."""
    array = readonly(value, dtype, name, ndim=1, error=error)
    if len(array) != length:
        raise error(
            f"`{name}` has {len(array)} entries but `tokens` has {length}. Every per-token field must be as long as "
            "`tokens`; build records through a session or `miles_tito.to_samples` rather than by hand."
        )
    return array


def _cast(array: np.ndarray, dtype: np.dtype, name: str, error: type[RecordError]) -> np.ndarray:
    kinds = {"i": "iu", "b": "biu", "f": "fiu"}[dtype.kind]
    if array.size and array.dtype.kind not in kinds:
        raise error(f"`{name}` has type {array.dtype}; it must be {dtype}.")
    cast = array.astype(dtype)
    if dtype.kind in "ib" and not np.array_equal(cast, array):
        raise error(f"`{name}` holds values that do not fit {dtype}: range {array.min()} to {array.max()}.")
    return cast


def ids_as_json(ids: np.ndarray) -> bytes:
    """Token ids as a JSON array, padded with spaces: a gather instead of a loop, far faster for long prompts."""
    if not len(ids):
        return b"[]"
    text = np.take(_spelled(1 << int(ids.max()).bit_length()), ids).tobytes()
    return b"[" + text[:-1] + b"]"


@lru_cache(maxsize=4)
def _spelled(size: int) -> np.ndarray:
    """[size] of `b"    123,"`, eight characters as one number, since numpy gathers those at once."""
    assert size <= 10**7, f"a vocabulary of {size} has ids of more than seven digits"
    return np.array([b"%7d," % token for token in range(size)], dtype="S8").view(np.uint64)
