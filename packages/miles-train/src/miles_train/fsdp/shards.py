"""The weights as this rank holds them, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles_train.trainer import Shard

Box = tuple[tuple[int, int], ...]


def model_shards(lm: Any, *, rank: int, ranks: int, dtype: torch.dtype) -> Iterator[Shard]:
    """Every block of every weight that this rank is to send; over all ranks they tile each weight exactly once.

    Tied weights come once, empty blocks not at all, and what is not sharded (persistent buffers) from rank 0.
    """
    for name, parameter in lm.named_parameters():
        box, block = _block(parameter.detach(), rank=rank, ranks=ranks)
        if block.numel():
            yield Shard(name, tuple(parameter.shape), _name(dtype), box, block.to(dtype))
    if rank == 0:
        saved = lm.state_dict().keys()
        for name, buffer in lm.named_buffers():
            if name in saved:
                yield Shard(name, tuple(buffer.shape), _name(buffer.dtype), _whole(buffer), buffer)


def _block(parameter: Tensor, *, rank: int, ranks: int) -> tuple[Box, Tensor]:
    if not isinstance(parameter, DTensor):
        return _whole(parameter), parameter
    block = parameter.to_local()
    size = parameter.shape[0]
    chunk = -(
        -size // ranks
    )  # FSDP2 cuts the first dimension as torch.chunk does: the last chunks may be short or empty
    start, stop = min(rank * chunk, size), min((rank + 1) * chunk, size)
    assert block.shape[0] == stop - start, f"FSDP holds {block.shape[0]} rows of {size}, expected {start}:{stop}"
    return ((start, stop), *_whole(parameter)[1:]), block


def _whole(tensor: Tensor) -> Box:
    return tuple((0, size) for size in tensor.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
