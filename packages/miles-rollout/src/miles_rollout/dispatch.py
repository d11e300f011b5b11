"""Who runs a group: one worker in this process, or the least busy of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_tito import GroupRef, Prompt, Sampling

FAILED_BECAUSE = "failed_because"
"""Metadata of a group that has failed for a reason that its episodes' outcomes do not show."""


class RunGroup(Protocol):
    """Runs the sibling episodes of one prompt, here or on another machine."""

    async def __call__(
        self, prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef: ...


class LeastBusy:
    """Spreads groups over several workers, each to the one with the fewest running episodes."""

    def __init__(self, workers: Sequence[RunGroup]) -> None:
        if not workers:
            raise ValueError("LeastBusy needs at least one worker to send groups to, got none.")
        self._workers = tuple(workers)
        self._running = [0] * len(self._workers)

    async def __call__(
        self, prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef:
        index = self._running.index(min(self._running))
        self._running[index] += group_size
        try:
            return await self._workers[index](
                prompt, group_id=group_id, group_size=group_size, attempt=attempt, sampling=sampling
            )
        finally:
            self._running[index] -= group_size
