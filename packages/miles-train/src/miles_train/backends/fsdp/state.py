"""Everything that training changes, as blocks of named tensors: what checkpoints hold of a rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from miles_train.checkpoint.block_file import Block
from miles_train.ranks import Ranks

from .optimizer import Optimizer
from .shards import block_of


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
