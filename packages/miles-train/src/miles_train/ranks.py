"""This process's place among the trainer ranks, and the few collectives that training needs beside FSDP's own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from miles_tito.shared.ports import free_port

from .errors import BatchError, RankError

_TWIN_TIMEOUT = timedelta(hours=1)
"""A rank may wait this long for one whose disk is slower; a rank that has died is noticed at once."""


class Ranks:
    """This process among the ranks of a trainer, and the collectives that training needs; `join` makes it.

    A single rank has no process group: its collectives return what they are given.
    """

    def __init__(
        self, *, rank: int, count: int, device: torch.device, group: dist.ProcessGroup | None, owned: bool
    ) -> None:
        self.rank = rank
        self.count = count
        self.device = device
        self.group = group
        self._owned = owned

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """[ranks] every rank's picklable value."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        if self.group is not None:
            self.sum([0.0])  # gloo and NCCL alike, and under the group's timeout

    def check_equal(self, what: str, counts: Sequence[int]) -> None:
        """Fail on every rank at once, with the numbers, where ranks would otherwise wait for one another."""
        seen = self.gather(tuple(counts))
        if len(set(seen)) > 1:
            listed = "; ".join(f"rank {rank}: {list(value)}" for rank, value in enumerate(seen))
            raise BatchError(
                f"{what} differ between ranks ({listed}). Ranks meet in collectives in every micro-batch: give all of "
                "them the same counts, as `miles_train.pack` does."
            )

    def twin(self) -> Ranks:
        """The same ranks in a group of their own, for collectives on the host beside those of training. Collective."""
        cpu = torch.device("cpu")
        if self.count == 1:
            return Ranks(rank=0, count=1, device=cpu, group=None, owned=False)
        group = dist.new_group(backend="gloo", timeout=_TWIN_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        return Ranks(rank=self.rank, count=self.count, device=cpu, group=group, owned=True)

    def close(self) -> None:
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._owned = False

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor.tolist()


def pick_device(wanted: str) -> torch.device:
    """The device of this process: the current GPU where there is one and it is wanted."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RankError(
            '`device` is "cuda" but torch sees no GPU. Install a CUDA build of torch, or use device = "cpu".'
        )
    return torch.device("cuda", torch.cuda.current_device())


def join(
    *, rank: int, count: int, init_method: str | None, device: torch.device, timeout_s: float, needs_group: bool
) -> Ranks:
    """Join the trainer's process group, or the one that the caller has already made.

    Args:
        init_method: where ranks meet, e.g. `tcp://10.0.0.1:29500`; a single rank needs none.
        needs_group: a single rank is to have a process group as well, because FSDP shards it.
    """
    if not 0 <= rank < count:
        raise RankError(f"Rank {rank} does not exist among {count} ranks.")
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, count):
            raise RankError(
                f"torch.distributed is already rank {dist.get_rank()} of {dist.get_world_size()}, but this trainer is "
                f"to be rank {rank} of {count}. Give each trainer its own process."
            )
        return Ranks(rank=rank, count=count, device=device, group=dist.group.WORLD, owned=False)
    if count == 1 and not needs_group:
        return Ranks(rank=0, count=1, device=device, group=None, owned=False)
    if init_method is None:
        if count > 1:
            raise RankError(f"{count} ranks need an `init_method` to meet at, e.g. tcp://HOST:PORT of rank 0.")
        init_method = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return Ranks(rank=rank, count=count, device=device, group=dist.group.WORLD, owned=True)
