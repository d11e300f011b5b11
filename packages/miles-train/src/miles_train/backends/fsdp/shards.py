"""What this rank holds of the weights, under their Hugging Face names, and of all that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles_train.checkpoint.block_file import Block
from miles_train.errors import UnsupportedModel
from miles_train.ranks import Ranks
from miles_train.trainer import Box, Shard

from .optimizer import Optimizer


def model_shards(lm: Any, *, rank: int, ranks: int, dtype: torch.dtype) -> Iterator[Shard]:
    """Every block of every weight that this rank is to send; over all ranks they tile each weight exactly once.

    Tied weights come once, empty blocks not at all, what is not sharded (persistent buffers) from rank 0, and
    experts that Transformers keeps in one tensor one by one, as checkpoints and engines have them.
    """
    check_names(lm)
    for name, parameter in lm.named_parameters():
        box, block, _ = block_of(parameter.detach(), rank=rank, ranks=ranks)
        if block.numel():
            whole = Shard(name, tuple(parameter.shape), _name(dtype), box, block.to(dtype))
            yield from _experts(whole)
    if rank == 0:
        saved = lm.state_dict().keys()
        for name, buffer in lm.named_buffers():
            if name in saved:
                yield Shard(name, tuple(buffer.shape), _name(buffer.dtype), _whole(buffer.shape), buffer)


def block_of(tensor: Tensor, *, rank: int, ranks: int) -> tuple[Box, Tensor, bool]:
    """The block of a weight or moment that this rank holds: where it lies, an alias of it, and is it on every rank?"""
    if not isinstance(tensor, DTensor):
        return _whole(tensor.shape), tensor, True
    block = tensor.to_local()
    size = tensor.shape[0]
    chunk = -(-size // ranks)  # FSDP2 cuts as torch.chunk does: the last chunks may be short or empty
    start, stop = min(rank * chunk, size), min((rank + 1) * chunk, size)
    assert block.shape[0] == stop - start, f"FSDP holds {block.shape[0]} rows of {size}, expected {start}:{stop}"
    return ((start, stop), *_whole(tensor.shape[1:])), block, False


def state_blocks(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Iterator[tuple[Block, bool]]:
    """What this rank holds of each tensor, and whether it is the one to write it."""
    for name, tensor in named_tensors(model, optimizer):
        box, held, is_shared = block_of(tensor, rank=ranks.rank, ranks=ranks.count)
        is_ours = held.numel() > 0 and (ranks.rank == 0 or not is_shared)
        yield Block(name, tuple(tensor.shape), box, held), is_ours


def named_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Everything that training changes, and the persistent buffers."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"model.{name}", buffer
    for name, tensor in optimizer.named_state():
        yield f"optimizer.{name}", tensor


def check_names(lm: Any) -> None:
    """Refuse a model whose parameters are arranged otherwise in its checkpoints than `model_shards` undoes."""
    from transformers.core_model_loading import revert_weight_conversion

    empty = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in lm.named_parameters()}
    ours = {
        shard.name
        for name, tensor in empty.items()
        for shard in _experts(Shard(name, tuple(tensor.shape), "", _whole(tensor.shape), tensor))
    }
    theirs = set(revert_weight_conversion(lm, empty))
    if ours != theirs:
        raise UnsupportedModel(
            f"Checkpoints of {type(lm).__name__} name or split weights in a way that shards do not follow yet, e.g. "
            f"{sorted(theirs - ours)[:2]} for {sorted(ours - theirs)[:2]}. Update the engine from an exported folder."
        )


def _experts(shard: Shard) -> Iterator[Shard]:
    """The weights of single experts from one tensor [experts, …]; any other shard unchanged."""
    if not _is_fused(shard.name, shard.global_shape):
        yield shard
        return
    prefix, _, kind = shard.name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    size = (shard.global_shape[1] // len(parts), shard.global_shape[2])
    first, stop = shard.box[0]
    for expert in range(first, stop):
        for part, block in zip(parts, shard.tensor[expert - first].split(size[0]), strict=True):
            yield Shard(f"{prefix}.{expert}.{part}.weight", size, shard.dtype, _whole(size), block)


def _is_fused(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
