"""SHA-256 of codes and scales, taken where they are sent and checked where they arrived.

A sender's block is a box of a stored tensor; the receiver holds the tensor whole, cuts the same box and compares. No
rank needs to see another's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from .shards import Box, PackedShard


class Digest(NamedTuple):
    """The SHA-256 of one block of a stored tensor, from the rank that sent it."""

    name: str
    dtype: str
    box: Box
    sha256: str


def with_digests(shards: Iterable[PackedShard], digests: list[Digest]) -> Iterator[PackedShard]:
    """The shards unchanged; the digest of each is appended to `digests` as it passes."""
    for shard in shards:
        digests.append(Digest(shard.name, shard.dtype, shard.box, sha256_of(shard.tensor)))
        yield shard


def differing(digests: Iterable[Digest], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are absent or not, byte for byte, what was sent; in the order of `digests`, each once."""
    wrong: dict[str, None] = {}
    for name, dtype, box, sha256 in digests:
        tensor = tensors.get(name)
        if (
            tensor is None
            or str(tensor.dtype) != f"torch.{dtype}"
            or tensor.dim() != len(box)
            or any(stop > size for (_, stop), size in zip(box, tensor.shape, strict=True))
            or sha256_of(tensor[tuple(slice(*interval) for interval in box)]) != sha256
        ):
            wrong[name] = None
    return list(wrong)


def sha256_of(tensor: torch.Tensor) -> str:
    """Of the bytes in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
