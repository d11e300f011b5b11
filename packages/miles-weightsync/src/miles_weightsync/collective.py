"""The trainer ranks acting together: every step either succeeds on all of them or raises on all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from .errors import ShardError, SyncError, WeightSyncError
from .shm import SHM_DIR

T = TypeVar("T")

_dist: Any = dist
"""For the functions of torch.distributed that have no types."""

_GRACE_S = 60.0
"""The leader may use its whole deadline on the engines before it tells the other ranks; they wait a little longer."""


def host_id() -> str:
    """Equal for two processes exactly when they see the same /dev/shm."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat(SHM_DIR).st_dev}"


class Ranks:
    """The process group of a push: a group of its own on gloo, whose collectives end by timeout, never hang."""

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self.rank, self.size = members.index(dist.get_rank()), len(members)
            if self.size > 1:
                self._group = _gloo_group(tuple(members), timeout_s + _GRACE_S)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def agree(self, phase: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and share what it returned.

        Returns:
            One value a rank, in rank order, on every rank.

        Raises:
            SyncError: on every rank, when `work` raised on any, or a rank did not answer; names ranks and causes.
            ShardError: on every rank, when that was the cause.
        """
        outcome: _Outcome[T] = _Outcome()
        try:
            outcome.value = work()
        except Exception as error:  # the one boundary: the other ranks must hear of it before it is raised
            outcome.error, outcome.is_shard_error = _describe(error), isinstance(error, ShardError)
            outcome.cause = error
        cause, outcome.cause = outcome.cause, None
        everyone = self._gather(phase, outcome)
        failed = [(rank, other) for rank, other in enumerate(everyone) if other.error is not None]
        if not failed:
            return [cast(T, other.value) for other in everyone]
        if all(other.is_shard_error for _, other in failed):
            raise ShardError(" / ".join(dict.fromkeys(str(other.error) for _, other in failed))) from cause
        told = "; ".join(f"rank {rank}: {other.error}" for rank, other in failed)
        raise SyncError(f"The push failed in phase `{phase}` on the trainer side: {told}", phase=phase) from cause

    def send_to_leader(self, data: torch.Tensor) -> None:
        """Send bytes from this rank's memory to rank 0."""
        dist.send(data, group=self._group, group_dst=0)

    def receive(self, data: torch.Tensor, *, rank: int) -> None:
        """Rank 0: receive what `rank` sends."""
        dist.recv(data, group=self._group, group_src=rank)

    def _gather(self, phase: str, outcome: _Outcome[T]) -> list[_Outcome[T]]:
        if self.size == 1:
            return [outcome]
        everyone: list[Any] = [None] * self.size
        try:
            _dist.all_gather_object(everyone, outcome, group=self._group)
        except RuntimeError as error:  # gloo: timeout, or the connection of a dead rank
            _forget(self._group)
            raise SyncError(
                f"Rank {self.rank} lost the other {self.size - 1} trainer ranks in phase `{phase}` of a push "
                f"({_first_line(error)}). One of them died or hangs; see its log.",
                phase=phase,
            ) from error
        return everyone


_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
"""Kept for the life of the trainer's default group: PyTorch names a group by its ranks, and one that is destroyed and
made again under the same name meets the stale addresses of the first in the store."""


def _gloo_group(members: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup:
    key = (dist.group.WORLD, members, timeout_s)
    if key not in _groups:
        _groups[key] = _dist.new_group(
            ranks=list(members),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=True,  # other ranks of the trainer need not take part
        )
    return _groups[key]


def _forget(group: dist.ProcessGroup | None) -> None:
    """A group that lost a rank is of no more use; the next Pusher makes another."""
    for key in [key for key, known in _groups.items() if known is group]:
        del _groups[key]


class _Outcome(Generic[T]):
    """What one rank has to say after a step."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: str | None = None
        self.is_shard_error = False
        self.cause: Exception | None = None


def _describe(error: Exception) -> str:
    """The message of an error of ours; of any other, its type too."""
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
