"""What changed between two versions of the weights: lossless codecs over bit patterns, and a store of versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .blob import Codec
from .choose import Choice, choose
from .codec import Decoded, decode, encode, encode_decoded
from .errors import BaseVersionError, DeltaError, StoreError
from .patch import apply, apply_blob, fold, undo

if TYPE_CHECKING:
    from .manifest import Manifest, Part
    from .store import Chain, DeltaStore

__all__ = [
    "BaseVersionError",
    "Chain",
    "Choice",
    "Codec",
    "Decoded",
    "DeltaError",
    "DeltaStore",
    "Manifest",
    "Part",
    "StoreError",
    "apply",
    "apply_blob",
    "choose",
    "decode",
    "encode",
    "encode_decoded",
    "fold",
    "undo",
]


def __getattr__(name: str) -> object:
    if name in ("Chain", "DeltaStore"):  # these need fsspec, which receivers in an engine can do without
        from . import store

        return getattr(store, name)
    if name in ("Manifest", "Part"):
        from . import manifest

        return getattr(manifest, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
