"""Shards on their way to the engine: what the recipe quantises becomes codes and scales, the rest passes through.

A shard is matched structurally: anything with `name`, `global_shape`, `dtype`, `box` and `tensor`. Because a box
holds whole blocks, every rank quantises alone and the result equals quantising the whole tensor, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from .errors import QuantError
from .fp8 import Fp8Format
from .recipe import Recipe

Box = tuple[tuple[int, int], ...]


class ShardLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def tensor(self) -> torch.Tensor: ...


class PackedShard(NamedTuple):
    """One rank's block of a stored tensor."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: torch.Tensor


def quantize_shards(shards: Iterable[ShardLike], recipe: Recipe) -> Iterator[PackedShard]:
    """Packed shards in the order given; a quantised `x.weight` is followed by its `x.weight_scale_inv`.

    Raises:
        QuantError: a box cuts a block; the message names the nearest aligned box.
    """
    for shard in shards:
        if not recipe.quantizes(shard.name, shard.global_shape):
            yield PackedShard(shard.name, tuple(shard.global_shape), shard.dtype, shard.box, shard.tensor)
            continue
        yield from _quantize(shard, recipe.format)


def _quantize(shard: ShardLike, format: Fp8Format) -> Iterator[PackedShard]:
    shape = tuple(shard.global_shape)
    block = format.block or shape
    _check_aligned(shard, block)
    if 0 in shard.tensor.shape:
        return  # this rank holds no row of the tensor
    codes, scale = format.quantize(shard.tensor)
    yield PackedShard(shard.name, shape, "float8_e4m3fn", shard.box, codes)
    yield PackedShard(
        f"{shard.name.removesuffix('.weight')}.weight_scale_inv",
        tuple(-(-n // b) for n, b in zip(shape, block, strict=True)),
        "float32",
        tuple((start // b, -(-stop // b)) for (start, stop), b in zip(shard.box, block, strict=True)),
        scale,
    )


def _check_aligned(shard: ShardLike, block: tuple[int, ...]) -> None:
    aligned = tuple(
        (start // b * b, min(-(-stop // b) * b, size))
        for (start, stop), b, size in zip(shard.box, block, shard.global_shape, strict=True)
    )
    if aligned != tuple(map(tuple, shard.box)) and 0 not in shard.tensor.shape:
        raise QuantError(
            f"Box {shard.box} of {shard.name} {tuple(shard.global_shape)} cuts a block of {block}; its scale would "
            f"need values of another rank. The nearest aligned box is {aligned}."
        )
