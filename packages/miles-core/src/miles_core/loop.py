"""The one loop. Synchronous training is `max_staleness = 0`, asynchronous any other number, SFT a loop without engines.

    producer ──put──▶ GroupBuffer ──take──▶ plan ──▶ train ──▶ push ──▶ release ──▶ monitor
       ▲                                                                   │
       └─────────────── credits: at most (max_staleness + 1) × batch ◀─────┘

Nothing here knows Ray, torch or SGLang: `trainer` and `sync` are whatever answers the two protocols below.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_rollout.advantages import Advantages
from miles_rollout.buffer import GroupBuffer
from miles_tito.summary import GroupRef

from .batching import RankWork, plan_batch
from .metrics import rollout_metrics
from .monitor import Monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the trainer ranks report after one batch."""

    version: int
    metrics: dict[str, float]


class TrainerGroup(Protocol):
    """Every trainer rank, driven together."""

    num_ranks: int

    async def train(self, work: Sequence[RankWork]) -> Trained: ...


class Sync(Protocol):
    """Puts one version of the weights into every engine; returns metrics once all of them serve it."""

    async def push(self, version: int) -> dict[str, float]: ...


class NoSync:
    """Stands in where no engine serves the weights (SFT)."""

    async def push(self, version: int) -> dict[str, float]:
        return {}


OnStep = Callable[[int, Sequence[GroupRef]], Awaitable[dict[str, float]]]
"""Called after each committed step with the version and the groups trained; returns metrics to log (evaluation, index)."""


async def run(
    *,
    produce: Callable[[], Awaitable[None]],
    buffer: GroupBuffer,
    trainer: TrainerGroup,
    sync: Sync,
    advantages: Advantages,
    token_budget: int,
    monitor: Monitor,
    steps: int,
    on_step: OnStep,
) -> None:
    """Train `steps` steps, then stop the producer and wait for its last groups to reach their fate.

    Raises whatever ends a producer, a trainer rank or a push: a crashed part ends the run instead of hanging it.
    """
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(_close_on_exit(produce, buffer), name="producer")
        for _ in range(steps):
            clock = Clock()
            groups = await buffer.take()
            clock.lap("time/take_wait")
            work = plan_batch(groups, advantages=advantages, token_budget=token_budget, ranks=trainer.num_ranks)
            rollout = rollout_metrics(groups, version=buffer.version)
            trained = await trainer.train(work)
            clock.lap("time/train", lane="trainer", monitor=monitor)
            pushed = await sync.push(trained.version)
            clock.lap("time/sync", lane="sync", monitor=monitor)
            buffer.set_version(trained.version)
            buffer.release(groups)  # only now: the engines hold the weights trained on these groups
            extra = await on_step(trained.version, groups)
            clock.lap("time/on_step")
            monitor.log(
                trained.version,
                rollout | trained.metrics | pushed | extra | buffer.metrics() | clock.metrics(),
            )
        producer.cancel()


async def _close_on_exit(produce: Callable[[], Awaitable[None]], buffer: GroupBuffer) -> None:
    """A producer that ends or fails wakes a waiting `take()`: no group will come any more."""
    try:
        await produce()
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        buffer.close(error)
        raise
    buffer.close()


class Clock:
    """Splits the wall time of one step into named parts."""

    def __init__(self) -> None:
        self._start = self._last = time.time()
        self._parts: dict[str, float] = {}

    def lap(self, name: str, *, lane: str | None = None, monitor: Monitor | None = None) -> None:
        now = time.time()
        self._parts[name] = now - self._last
        if lane is not None and monitor is not None:
            monitor.event(name.removeprefix("time/"), self._last, now, lane)
        self._last = now

    def metrics(self) -> dict[str, float]:
        return self._parts | {"time/step": time.time() - self._start}
