"""The one loop. Synchronous training is `max_staleness = 0`, asynchronous any other number, SFT a loop without engines.

    producer ──put──▶ GroupBuffer ──take──▶ train ──▶ push ──▶ release ──▶ monitor
       ▲                                                          │
       └──────── credits: at most (max_staleness + 1) batches ◀───┘

Nothing here knows Ray, torch or SGLang: `train` and `push` are whatever does the two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from miles_rollout.buffer import GroupBuffer
from miles_tito.records.summary import GroupRef

from miles_core.batching import Trained
from miles_core.monitor import Monitor
from miles_core.monitor.metrics import fate_metrics, rollout_metrics

Train = Callable[[Sequence[GroupRef]], Awaitable[Trained]]
"""Trains one batch of groups on every rank; the new version lies in the trainer alone."""

Push = Callable[[int], Awaitable[dict[str, float]]]
"""Puts this version of the weights into the engines; returns metrics once they serve it."""

OnStep = Callable[[int, Sequence[GroupRef], dict[str, float]], Awaitable[dict[str, float]]]
"""Called after each step with its version, its groups and its metrics so far; returns more of them."""


async def nothing_more(version: int, groups: Sequence[GroupRef], metrics: dict[str, float]) -> dict[str, float]:
    """An `OnStep` that adds nothing."""
    return {}


async def run(
    *,
    produce: Callable[[], Coroutine[Any, Any, None]],
    buffer: GroupBuffer,
    train: Train,
    push: Push | None,
    monitor: Monitor,
    steps: int,
    on_step: OnStep,
) -> None:
    """Train from the buffer's version up to version `steps`, then stop the producer and its last groups.

    Raises whatever ends a producer, a trainer rank or a push: a crashed process ends the run instead of hanging it.

    Args:
        push: None where no engine serves the weights, as in supervised training.
    """
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(), name="producer")
        while buffer.version < steps:
            clock = Clock()
            groups = await buffer.take()
            clock.lap("time/take_wait")
            rollout = rollout_metrics(groups, version=buffer.version)
            trained = await train(groups)
            clock.lap("time/train", lane="trainer", monitor=monitor)
            pushed = await push(trained.version) if push else {}
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
