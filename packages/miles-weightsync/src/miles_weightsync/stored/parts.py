"""The parts of a stored version: which rank puts which block of which tensor, and how a reader learns of it.

A block is one part, whatever the number of ranks that hold it. Its name is that of the tensor and the box, so that it
is the same in every version. The manifest's metadata has the tensors' shapes, element types and boxes, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..bits import SIGNED, UNSIGNED, as_signed
from ..buckets import make_buckets, torch_dtype
from ..delta import StoreError
from ..delta.manifest import Manifest
from ..errors import ShardError
from ..layout import Box, ShardSpec, show, volume

Bits = NDArray[np.unsignedinteger]
"""[elements] uint8, uint16 or uint32; elements of eight bytes are two."""

METADATA = "layout"


class Stored(NamedTuple):
    """One part, and who puts it."""

    part: str
    rank: int
    held: ShardSpec
    """As the rank holds it."""
    spec: ShardSpec
    """As it is stored: perhaps with another element type."""

    @property
    def nbytes(self) -> int:
        return volume(self.spec.box) * torch_dtype(self.spec.dtype).itemsize


def plan_parts(specs_R: Sequence[Sequence[ShardSpec]], *, dtype: str | None) -> tuple[Stored, ...]:
    """The parts of a version; equal input gives equal parts on every rank.

    Args:
        specs_R: for each rank R, the shards that it holds. Of several holders the one with the least so far puts.
        dtype: element type that floating-point tensors are stored in; None keeps theirs.

    Raises:
        ShardError: a tensor is not covered exactly once, or ranks disagree on its shape or element type.
    """
    parts: list[Stored] = []
    for bucket in make_buckets(specs_R, bucket_bytes=1 << 62, dtype=dtype):
        for slot in bucket.slots:
            if torch_dtype(slot.dtype).itemsize not in SIGNED:
                raise ShardError(f"`{slot.name}` is {slot.dtype}; elements of more than 8 bytes cannot be stored.")
            for piece in slot.pieces:
                held = ShardSpec(slot.name, slot.shape, slot.source_dtype, piece.box)
                spec = ShardSpec(slot.name, slot.shape, slot.dtype, piece.box)
                parts.append(Stored(f"{slot.name}{show(piece.box)}", piece.rank, held, spec))
    if not parts:
        raise ShardError("No rank gave a shard; there is nothing to push.")
    return tuple(parts)


def bits(tensor: torch.Tensor, dtype: str) -> Bits:
    """The elements of a shard as they are stored; shares memory with it where it can."""
    sent = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous().reshape(-1)
    return as_signed(sent).numpy().view(UNSIGNED[min(sent.element_size(), 4)])


def describe(parts: Iterable[Stored]) -> str:
    """What the metadata of a manifest says."""
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        spec = part.spec
        tensor = tensors.setdefault(spec.name, {"shape": spec.shape, "dtype": spec.dtype, "boxes": []})
        tensor["boxes"].append(spec.box)
    return json.dumps(tensors, separators=(",", ":"), sort_keys=True)


def read_layout(manifest: Manifest) -> dict[str, ShardSpec]:
    """The block that each part of a version is.

    Raises:
        StoreError: the version says nothing of its tensors, or its parts are not those of its tensors.
    """
    if METADATA not in manifest.metadata:
        raise StoreError(
            f"Version {manifest.version} does not say which tensors its parts are: it was not published with "
            "`way = store`."
        )
    found: dict[str, ShardSpec] = {}
    try:
        tensors = cast("Mapping[str, Mapping[str, Any]]", json.loads(manifest.metadata[METADATA]))
        for name, tensor in tensors.items():
            for spans in tensor["boxes"]:
                box: Box = tuple((start, stop) for start, stop in spans)
                found[f"{name}{show(box)}"] = ShardSpec(name, tuple(tensor["shape"]), tensor["dtype"], box)
        nbytes = {part.name: part.count * np.dtype(part.dtype).itemsize for part in manifest.parts}
        wanted = {name: volume(spec.box) * torch_dtype(spec.dtype).itemsize for name, spec in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"Version {manifest.version} says of its tensors what cannot be read ({error}); another version of the "
            "package may have written it. Publish a full version."
        ) from error
    if nbytes != wanted:
        odd = sorted(name for name in nbytes.keys() | wanted.keys() if nbytes.get(name) != wanted.get(name))
        raise StoreError(
            f"{len(odd)} parts of version {manifest.version} do not fit its tensors, the first {odd[0]}: "
            f"{nbytes.get(odd[0])} bytes instead of {wanted.get(odd[0])}. Publish a full version."
        )
    return found
