"""Evaluation beside training: a snapshot of the weights, and one evaluation of it at a time.

begin ─▶ one still runs? ─┬─ backpressure: wait for it ─▶ snapshot ─▶ return, training goes on
                          │                                 └─▶ evaluate ─▶ point, logged at its own step
                          └─ skip: skipped point
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from .evaluator import Evaluator
from .points import DatasetScore, EvalLog


class SnapshotScorer(Protocol):
    """Scores one snapshot of the weights, a Hugging Face folder."""

    async def __call__(self, step: int, snapshot: Path) -> Sequence[DatasetScore]: ...

    async def close(self) -> None: ...


class BackgroundEvaluator(Evaluator):
    """Evaluates a snapshot beside training, at most one at a time; `SnapshotScorer` says on which engines."""

    def __init__(
        self,
        scorer: SnapshotScorer,
        *,
        snapshots: Path,
        export: Callable[[Path], Awaitable[None]],
        log: EvalLog,
        log_late: Callable[[int, Mapping[str, float]], None],
        overlap: Literal["backpressure", "skip"],
        timeout_s: float,
    ) -> None:
        """
        Args:
            snapshots: folder for the weights of the step that is being evaluated.
            export: writes the trainer's present weights as a Hugging Face folder.
            log_late: takes the metrics of an earlier step.
        """
        shutil.rmtree(snapshots, ignore_errors=True)  # of a process that died: nobody evaluates them any more
        self._scorer = scorer
        self._snapshots = snapshots
        self._export = export
        self._log = log
        self._log_late = log_late
        self._overlap = overlap
        self._timeout_s = timeout_s
        self._running: asyncio.Task[None] | None = None
        self._step = 0
        self._began = 0.0

    async def begin(self, step: int) -> dict[str, float]:
        began = time.time()
        is_running = self._running is not None and not self._running.done()
        if is_running and self._step == step:  # the trainer went back to weights that are being evaluated
            return {}
        if is_running and self._overlap == "skip":
            reason = f"the evaluation of step {self._step} still runs"
            return self._log.skipped(step, reason, began=began)
        await self.drain()
        try:
            self._snapshots.mkdir(parents=True, exist_ok=True)
            await self._export(self._folder(step))
        except Exception as error:  # the boundary: training does not end because an evaluation did
            self._drop(step)
            return self._failed(step, error, "writing a snapshot of the weights", began)
        self._step, self._began = step, began
        self._running = asyncio.create_task(self._evaluate(step, began), name=f"evaluate step {step}")
        return {}

    async def drain(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def rewind(self, step: int) -> None:
        if self._step > step and await self._cancel():
            self._log.skipped(self._step, f"the run went back to step {step}", began=self._began)

    async def close(self) -> None:
        try:
            await self._cancel()
        finally:
            await self._scorer.close()

    async def _cancel(self) -> bool:
        """Cancel what runs; returns whether that kept it from a point."""
        running, self._running = self._running, None
        if running is None or running.done():
            return False
        running.cancel()
        await asyncio.wait([running])
        self._drop(self._step)  # a task that never began has not done it
        return running.cancelled()

    async def _evaluate(self, step: int, began: float) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                scores = await self._scorer(step, self._folder(step))
        except Exception as error:  # the boundary, as above
            metrics = self._failed(step, error, "evaluating", began)
        else:
            metrics = self._log.scored(step, scores, began=began)
        finally:
            self._drop(step)
        self._log_late(step, metrics)

    def _failed(self, step: int, error: Exception, doing: str, began: float) -> dict[str, float]:
        return self._log.failed(step, error, doing, timeout_s=self._timeout_s, began=began)

    def _folder(self, step: int) -> Path:
        return self._snapshots / f"step-{step:06d}"

    def _drop(self, step: int) -> None:
        shutil.rmtree(self._folder(step), ignore_errors=True)
