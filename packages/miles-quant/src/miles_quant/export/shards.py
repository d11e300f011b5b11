"""Shards on their way to the engine: what the recipe quantises becomes codes and scales, the rest passes through.

A shard is matched structurally: anything with `name`, `global_shape`, `dtype`, `box` and `tensor`. Because a box holds
whole blocks, and a maximum that enters the whole tensor is agreed on first, every rank quantises alone and the result
equals quantising the whole tensor, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..errors import QuantError
from ..formats.spec import Format, QuantizedTensor, StoredPart, round_to_source, stored_name
from ..recipe.recipe import Recipe, siblings

Box = tuple[tuple[int, int], ...]
ReduceMax = Callable[[dict[str, float]], Mapping[str, float]]
"""Maxima over all ranks, key by key; a rank may lack keys that others have. Collective: every rank calls it once."""


class ShardLike(Protocol):
    """What a trainer holds of one tensor; any object with these attributes will do."""

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


Shards = Callable[[], Iterable[ShardLike]]
"""All that one rank holds, listed anew at every call, e.g. `trainer.shards`."""


class PackedShard(NamedTuple):
    """One rank's block of a tensor as it is stored: codes, scales, or a tensor that is not quantised."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: torch.Tensor


def quantize_shards(shards: Shards, recipe: Recipe, *, reduce_max: ReduceMax | None = None) -> Iterator[PackedShard]:
    """Packed shards in the order given; a quantised `x.weight` becomes all that the format stores for it.

    Maxima are agreed on before this returns; the shards themselves are made without communication.

    Args:
        shards: called twice for a format with a scale of the whole tensor, whose maxima are needed first.
        reduce_max: maxima over the ranks, for such a format; unset where one rank holds every tensor whole.

    Raises:
        QuantError: a box cuts a block (the nearest aligned box is named), a weight holds NaN or Inf, or a tensor is
            cut and there is no `reduce_max`.
    """
    return _each(shards, recipe, reduce_max, _pack)


def round_shards(shards: Shards, recipe: Recipe, *, reduce_max: ReduceMax | None = None) -> Iterator[PackedShard]:
    """The same shards with the values that the packed ones stand for, in their own type: for engines that hold plain
    weights. Arguments and errors are those of `quantize_shards`."""
    return _each(shards, recipe, reduce_max, _round)


def largest_over_ranks(local: dict[str, float]) -> dict[str, float]:
    """The maximum of every key over the ranks of the default group, any of which may lack keys; a `reduce_max`.

    Collective. Without a process group this rank is alone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return local
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, local)
    return {key: max(held.get(key, 0.0) for held in everyone) for key in {key for held in everyone for key in held}}


def check_boxes(shards: Iterable[ShardLike], recipe: Recipe) -> None:
    """Check that this rank can quantise what it holds; call it before training starts.

    Raises:
        QuantError: a box cuts a block; the nearest aligned box is named.
    """
    for shard in shards:
        if recipe.quantizes(shard.name, shard.global_shape) and 0 not in shard.tensor.shape:
            _check_aligned(shard, recipe.spec)


def _each(
    shards: Shards,
    recipe: Recipe,
    reduce_max: ReduceMax | None,
    made_of: Callable[[ShardLike, QuantizedTensor, Format], Iterable[PackedShard]],
) -> Iterator[PackedShard]:
    """Every shard as it is, or what `made_of` makes of its codes; an empty shard of a quantised tensor is left out."""
    amaxes = _amaxes(shards, recipe, reduce_max)  # now, not at the first shard: every rank takes part at the same time

    def each() -> Iterator[PackedShard]:
        for shard in shards():
            if not recipe.quantizes(shard.name, shard.global_shape):
                yield _as_it_is(shard)
            elif 0 not in shard.tensor.shape:
                _check_aligned(shard, recipe.spec)
                source = _source(shard, recipe)
                amax = torch.tensor(amaxes[_key(shard.name)], device=shard.tensor.device) if amaxes else None
                yield from made_of(shard, recipe.spec.quantize(source, amax=amax), recipe.spec)

    return each()


def _as_it_is(shard: ShardLike) -> PackedShard:
    return PackedShard(shard.name, tuple(shard.global_shape), shard.dtype, shard.box, shard.tensor)


def _round(shard: ShardLike, quantized: QuantizedTensor, format: Format) -> Iterator[PackedShard]:
    yield _as_it_is(shard)._replace(tensor=format.dequantize(quantized, dtype=shard.tensor.dtype))


def _amaxes(shards: Shards, recipe: Recipe, reduce_max: ReduceMax | None) -> Mapping[str, float]:
    """The largest absolute value of each quantised matrix with its fused siblings, over all ranks; empty for a format
    without a scale of the whole tensor.

    A weight that is broken on one rank counts as infinite, so that every rank hears of it and none is left waiting.
    """
    if not recipe.spec.name.has_tensor_scale:
        return {}
    local: dict[str, float] = {}
    broken: QuantError | None = None
    for shard in shards():
        if not recipe.quantizes(shard.name, shard.global_shape) or 0 in shard.tensor.shape:
            continue
        if reduce_max is None and math.prod(shard.global_shape) != shard.tensor.numel():
            raise QuantError(
                f"This rank holds {shard.box} of {shard.name} {tuple(shard.global_shape)}; {recipe.format} has a scale "
                "of the whole tensor, so pass `reduce_max`."
            )
        try:
            largest = float(recipe.spec.amax(_source(shard, recipe)))
        except QuantError as error:
            broken, largest = broken or error, math.inf
        key = _key(shard.name)
        local[key] = max(local.get(key, 0.0), largest)
    agreed = local if reduce_max is None else reduce_max(dict(local))
    if broken is not None:
        raise broken
    for key, value in local.items():
        if agreed.get(key, -1.0) < value:
            raise QuantError(f"`reduce_max` returned {agreed.get(key)} for {key}, where this rank alone has {value}.")
    for key, value in agreed.items():
        if not math.isfinite(value):
            raise QuantError(f"{key}, or what is fused with it, holds NaN or Inf on another rank; see that rank's log.")
    return agreed


def _pack(shard: ShardLike, quantized: QuantizedTensor, format: Format) -> Iterator[PackedShard]:
    rows, columns = shard.global_shape
    stored = format.store(replace(quantized, shape=(rows, columns)))  # INT4 stores the shape: the whole tensor's
    for part in format.parts:
        box = _stored_box(part, shard)
        if box is not None:
            yield PackedShard(
                stored_name(shard.name, part.suffix),
                part.shape_of(tuple(shard.global_shape)),
                str(part.dtype).removeprefix("torch."),
                box,
                stored[part.suffix],
            )


def _stored_box(part: StoredPart, shard: ShardLike) -> Box | None:
    """Where this shard's piece of a part lies; None for what the rank with the first element sends."""
    if part.tile is None:
        return tuple((0, n) for n in part.whole_shape) if not any(start for start, _ in shard.box) else None
    tiles = (tile or size for tile, size in zip(part.tile, shard.global_shape, strict=True))
    return tuple((start // tile, -(-stop // tile)) for (start, stop), tile in zip(shard.box, tiles, strict=True))


def _check_aligned(shard: ShardLike, format: Format) -> None:
    extents = tuple(stop - start for start, stop in shard.box)
    inside = len(extents) == len(shard.global_shape) and all(
        start >= 0 and stop <= size for (start, stop), size in zip(shard.box, shard.global_shape, strict=True)
    )
    if not inside or extents != tuple(shard.tensor.shape):
        raise QuantError(
            f"Box {shard.box} of {shard.name} {tuple(shard.global_shape)} is not one of the tensor of shape "
            f"{tuple(shard.tensor.shape)} that came with it."
        )
    units = [1, 1]
    for part in format.parts:
        for dim, tile in enumerate(part.tile or (1, 1)):
            units[dim] = math.lcm(units[dim], tile or shard.global_shape[dim])
    aligned = tuple(
        (start // unit * unit, min(-(-stop // unit) * unit, size))
        for (start, stop), unit, size in zip(shard.box, units, shard.global_shape, strict=True)
    )
    if aligned != tuple(map(tuple, shard.box)):
        raise QuantError(
            f"Box {shard.box} of {shard.name} {tuple(shard.global_shape)} cuts a block of {tuple(units)} of "
            f"{format.name}; its scale would need values of another rank. The nearest aligned box is {aligned}."
        )


def _source(shard: ShardLike, recipe: Recipe) -> torch.Tensor:
    return round_to_source(shard.name, shard.tensor, getattr(torch, recipe.source_dtype))


def _key(name: str) -> str:
    """One name for a matrix and all that engines fuse with it."""
    return min(siblings(name))
