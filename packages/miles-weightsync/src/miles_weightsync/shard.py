"""What a trainer rank hands over: its block of a named tensor."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .errors import ShardError
from .layout import Box, ShardSpec, show, volume

if TYPE_CHECKING:
    import torch


class Shard(NamedTuple):
    """A block of one tensor. Any object with these five attributes will do; see `ShardLike`."""

    name: str
    """Hugging Face name."""
    global_shape: tuple[int, ...]
    dtype: torch.dtype | str
    """Element type of the whole tensor, which `tensor` must have: a torch dtype or its name."""
    box: Box
    """(start, stop) per dimension: which part of the whole tensor this block is. May be empty."""
    tensor: torch.Tensor
    """The local block, on any device."""


class ShardLike(Protocol):
    """The structure that is read; each package may define its own class for it."""

    @property
    def name(self) -> str: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype | str: ...
    @property
    def box(self) -> Box: ...
    @property
    def tensor(self) -> torch.Tensor: ...


def collect(shards: Iterable[ShardLike]) -> dict[ShardSpec, torch.Tensor]:
    """Read this rank's shards, check each against its own tensor, and drop empty ones.

    Raises:
        ShardError: a box lies outside its tensor, or the block has another shape or dtype than announced.
    """
    blocks: dict[ShardSpec, torch.Tensor] = {}
    for shard in shards:
        if not isinstance(shard.name, str) or not shard.name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ShardError(f"A shard is called {shard.name!r}; it needs the tensor's Hugging Face name.")
        spec = ShardSpec(
            name=shard.name,
            shape=tuple(index(n) for n in shard.global_shape),
            dtype=str(shard.dtype).removeprefix("torch."),
            box=tuple((index(start), index(stop)) for start, stop in shard.box),
        )
        _check_block(spec, shard.tensor)
        if volume(spec.box) == 0:
            continue
        if spec in blocks:
            raise ShardError(f"`{spec.name}`: box {show(spec.box)} was given twice by the same rank.")
        blocks[spec] = shard.tensor.detach()
    return blocks


def _check_block(spec: ShardSpec, tensor: torch.Tensor) -> None:
    spec.check()
    extent = tuple(stop - start for start, stop in spec.box)
    if tuple(tensor.shape) != extent:
        raise ShardError(
            f"`{spec.name}`: the block has shape {tuple(tensor.shape)} but its box {show(spec.box)} spans {extent}."
        )
    if tensor.device.type == "meta" or str(tensor.layout) != "torch.strided":
        what = "on the meta device, without values" if tensor.device.type == "meta" else f"{tensor.layout}, not dense"
        raise ShardError(f"`{spec.name}`: the block is {what}; hand over its values as a dense tensor.")
    got = str(tensor.dtype).removeprefix("torch.")
    if got != spec.dtype:
        raise ShardError(f"`{spec.name}`: the block is {got} but the shard says {spec.dtype}.")
