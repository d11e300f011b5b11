"""Awaiting something inside an episode, until the episode's deadline or its cancellation at the latest."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from miles_tito.records import Ctx

from .errors import DeadlineReached, EpisodeCancelled

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.5
"""How soon a set `ctx.cancelled`, which asyncio cannot wait for, is noticed."""
UNWIND_S = 1.0
"""How long cancelled work may take to unwind before it is left behind."""


def check(ctx: Ctx) -> None:
    """Raise if the episode is over; the deadline is looked at first, since the run cancels an episode right after it.

    Raises:
        DeadlineReached: its time is over.
        EpisodeCancelled: the run cancelled it.
    """
    if ctx.deadline is not None and time.monotonic() >= ctx.deadline:
        raise DeadlineReached(f"Episode {ctx.episode_id} reached its deadline.")
    if ctx.cancelled.is_set():
        raise EpisodeCancelled(f"Episode {ctx.episode_id} was cancelled by the run.")


async def bounded(work: Coroutine[Any, Any, T], ctx: Ctx) -> T:
    """The result of `work`, or the error of `check` as soon as the episode is over.

    Raises:
        DeadlineReached: see `check`.
        EpisodeCancelled: see `check`.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            check(ctx)
            left = math.inf if ctx.deadline is None else ctx.deadline - time.monotonic()
            await asyncio.wait({task}, timeout=max(0.0, min(POLL_S, left)))
        return task.result()
    finally:
        if not task.done():
            await _abandon(task)


async def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=UNWIND_S)
    if not task.done():
        logger.warning("work of an ended episode swallowed its cancellation and is left behind: %r", task)
