"""The errors of deltas and of the store that keeps them."""

from __future__ import annotations

from ..errors import WeightSyncError


class DeltaError(WeightSyncError, ValueError):
    """A delta cannot be made, read or applied: wrong element type or count, a damaged blob, or another base."""


class StoreError(WeightSyncError, OSError):
    """A version cannot be written to a `DeltaStore` or read from it; the message names the file or the version."""


class BaseVersionError(StoreError):
    """A delta belongs on another version than the one that it was about to be put on."""
