"""What changed between two versions of the weights: lossless codecs over bit patterns, and a store of versions."""

from __future__ import annotations

from .blob import Codec
from .codec import Decoded, decode, encode, encode_decoded
from .errors import BaseVersionError, DeltaError, StoreError
from .patch import apply, apply_blob, fold, undo

__all__ = [
    "BaseVersionError",
    "Codec",
    "Decoded",
    "DeltaError",
    "StoreError",
    "apply",
    "apply_blob",
    "decode",
    "encode",
    "encode_decoded",
    "fold",
    "undo",
]
