"""The one loop. Synchronous training is `max_staleness = 0`, asynchronous any other number, SFT a loop without engines.

    producer ──put──▶ GroupBuffer ──take──▶ plan ──▶ train ──▶ push ──▶ release ──▶ monitor
       ▲                                                                   │
       └─────────── credits: at most (max_staleness + 1) batches ◀─────────┘

Nothing here knows Ray, torch or SGLang: `trainer` and `sync` are whatever answers the two protocols below.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles_rollout.buffer import GroupBuffer
from miles_tito.records.summary import GroupRef

from miles_core.monitor import Monitor
from miles_core.monitor.metrics import fate_metrics, rollout_metrics

from .batching import AdvantagesByEpisode, RankWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the trainer ranks report after one batch."""

    version: int
    metrics: dict[str, float]


class TrainerGroup(Protocol):
    """Every trainer rank, driven together."""

    def plan(self, groups: Sequence[GroupRef], advantages: AdvantagesByEpisode) -> list[RankWork]: ...

    async def train(self, work: Sequence[RankWork]) -> Trained: ...


class Sync(Protocol):
    """Puts one version of the weights into every engine; returns metrics once all of them serve it."""

    async def push(self, version: int) -> dict[str, float]: ...


class NoSync:
    """Stands in where no engine serves the weights (SFT)."""

    async def push(self, version: int) -> dict[str, float]:
        return {}


OnStep = Callable[[int, Sequence[GroupRef], dict[str, float]], Awaitable[dict[str, float]]]
"""Called after each step with its version, its groups and its metrics so far; returns more of them."""


async def nothing_more(version: int, groups: Sequence[GroupRef], metrics: dict[str, float]) -> dict[str, float]:
    """An `OnStep` that adds nothing."""
    return {}


async def run(
    *,
    produce: Callable[[], Coroutine[Any, Any, None]],
    buffer: GroupBuffer,
    trainer: TrainerGroup,
    sync: Sync,
    advantages: AdvantagesByEpisode,
    monitor: Monitor,
    steps: int,
    on_step: OnStep,
) -> None:
    """Train from the buffer's version up to version `steps`, then stop the producer and its last groups.

    Raises whatever ends a producer, a trainer rank or a push: a crashed part ends the run instead of hanging it.
    """
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(), name="producer")
        while buffer.version < steps:
            clock = Clock()
            groups = await buffer.take()
            clock.lap("time/take_wait")
            work = trainer.plan(groups, advantages)
            rollout = rollout_metrics(groups, version=buffer.version)
            trained = await trainer.train(work)
            clock.lap("time/train", lane="trainer", monitor=monitor)
            pushed = await sync.push(trained.version)
            clock.lap("time/sync", lane="sync", monitor=monitor)
            buffer.set_version(trained.version)
            buffer.release(groups)  # only now: the engines hold the weights trained on these groups
            metrics = rollout | trained.metrics | pushed | buffer.metrics() | fate_metrics(buffer.counts())
            metrics |= await on_step(trained.version, groups, metrics | clock.metrics())
            clock.lap("time/on_step")
            monitor.log(trained.version, metrics | clock.metrics())
        producer.cancel()


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
