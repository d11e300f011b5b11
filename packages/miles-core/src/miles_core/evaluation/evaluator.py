"""What the run asks of an evaluation, whoever makes it; and the one on the rollout engines, while training waits.

begin ─▶ gate closed ─▶ running groups finish ─▶ every dataset ─▶ gate open ─▶ point
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from miles_rollout.dispatch import RunGroup
from miles_rollout.producer import Gate

from .points import EvalLog
from .scoring import DatasetScorer


class Evaluator:
    """Evaluates versions of the weights for the run; this one, for a run without evaluation, does nothing.

    Whatever goes wrong is a skipped point with its reason, never an error here. Only what keeps a point from being
    recorded (the ledger's disk is full) is raised.
    """

    async def begin(self, step: int) -> dict[str, float]:
        """Evaluate the weights of `step`, which trainer and engines hold; training goes on when this returns.

        Returns:
            metrics that are there already, for the row of `step`; later ones are logged when they come.
        """
        return {}

    async def drain(self) -> None:
        """Wait until every evaluation begun has its point."""

    async def rewind(self, step: int) -> None:
        """The run goes back to `step`: evaluations of later weights are cancelled, and their points dropped."""

    async def close(self) -> None:
        """Cancel what still runs, and stop what was started for it."""


class SharedEvaluator(Evaluator):
    """Evaluates on the rollout engines: stops the issue of groups, waits for those that run, scores; training waits."""

    def __init__(
        self,
        scorer: DatasetScorer,
        *,
        run_group_into: Callable[[Path | None], RunGroup],
        gate: Gate,
        idle: Callable[[], Awaitable[None]],
        log: EvalLog,
        timeout_s: float,
    ) -> None:
        """
        Args:
            idle: waits until no group of training runs, once the gate is closed.
        """
        self._scorer = scorer
        self._run_group_into = run_group_into
        self._gate = gate
        self._idle = idle
        self._log = log
        self._timeout_s = timeout_s

    async def begin(self, step: int) -> dict[str, float]:
        began = time.time()
        what = "waiting for the groups in flight"
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._gate.closed():
                    await self._idle()
                    what = "evaluating"
                    scores = await self._scorer(step, self._run_group_into)
        except Exception as error:  # the boundary: training does not end because an evaluation did
            return self._log.failed(step, error, what, timeout_s=self._timeout_s, began=began)
        return self._log.scored(step, scores, began=began)
