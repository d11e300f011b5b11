"""Evaluation on the rollout engines, while training waits.

begin ─▶ gate closed ─▶ running groups finish ─▶ every dataset ─▶ gate open ─▶ point
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from miles_rollout.dispatch import GroupRequest, RunGroup
from miles_rollout.producer import Gate
from miles_tito.records.summary import GroupRef

from .evaluator import Evaluator
from .points import EvalLog
from .scoring import DatasetScorer


class InFlight:
    """Runs the groups of training, and knows when none is running: the evaluator waits for that."""

    def __init__(self, run_group: RunGroup) -> None:
        self._run_group = run_group
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, request: GroupRequest) -> GroupRef:
        self._running += 1
        self._idle.clear()
        try:
            return await self._run_group(request)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no group runs; close the gate first."""
        await asyncio.sleep(0)  # a group that passed the gate just before is a task that has not begun yet
        await self._idle.wait()


class SharedEvaluator(Evaluator):
    """Evaluates on the rollout engines: stops the issue of groups, waits for those that run, scores; training waits."""

    def __init__(
        self,
        scorer: DatasetScorer,
        *,
        run_group_into: Callable[[Path | None], RunGroup],
        gate: Gate,
        in_flight: InFlight,
        log: EvalLog,
        timeout_s: float,
    ) -> None:
        self._scorer = scorer
        self._run_group_into = run_group_into
        self._gate = gate
        self._in_flight = in_flight
        self._log = log
        self._timeout_s = timeout_s

    async def begin(self, step: int) -> dict[str, float]:
        began = time.time()
        what = "waiting for the groups in flight"
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._gate.closed():
                    await self._in_flight.idle()
                    what = "evaluating"
                    scores = await self._scorer(step, self._run_group_into)
        except Exception as error:  # the boundary: training does not end because an evaluation did
            return self._log.failed(step, error, what, timeout_s=self._timeout_s, began=began).metrics()
        return self._log.scored(step, scores, began=began).metrics()
