"""Who runs a group: one worker in this process, or the least busy of many."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_tito import GroupRef, Prompt, Sampling

FAILED_BECAUSE = "failed_because"
"""Metadata of a group that has failed for a reason that its episodes' outcomes do not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The group to run: sibling episodes of one prompt, as the producer and an evaluation ask the workers for them."""

    prompt: Prompt
    group_id: str
    """Letters, digits, `_`, `.`, `-`: it becomes part of session ids in URLs."""
    group_size: int
    """Sibling episodes."""
    attempt: int = 0
    """Number of the first attempt, above those of an earlier issue of the same group."""
    sampling: Sampling | None = None
    """For this group alone, for example greedy for an evaluation; by default as the run samples."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.group_id):
            raise ValueError(
                f"Group id {self.group_id!r} must be made of letters, digits, '_', '.', '-': it goes into URLs."
            )
        if self.group_size < 1:
            raise ValueError(f"`group_size` is {self.group_size}; a group has at least one episode.")


class RunGroup(Protocol):
    """Runs a group, here or on another machine; `Worker.run_group_ref` is one, and so is `LeastBusy`."""

    async def __call__(self, request: GroupRequest) -> GroupRef: ...


class LeastBusy:
    """Spreads groups over several workers, each to the one with the fewest running episodes."""

    def __init__(self, workers: Sequence[RunGroup]) -> None:
        if not workers:
            raise ValueError("LeastBusy needs at least one worker to send groups to, got none.")
        self._workers = tuple(workers)
        self._running = [0] * len(self._workers)

    async def __call__(self, request: GroupRequest) -> GroupRef:
        index = self._running.index(min(self._running))
        self._running[index] += request.group_size
        try:
            return await self._workers[index](request)
        finally:
            self._running[index] -= request.group_size
