"""Evaluation on engines of its own, which load each snapshot of the weights; training never waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from miles_rollout.dispatch import RunGroup

from .points import DatasetScore
from .scoring import DatasetScorer

logger = logging.getLogger(__name__)


class EvalServing(Protocol):
    """Engines with `role = "eval"`, with a router, session servers and workers that training does not use."""

    async def start(self) -> None:
        """Start all of it, on whatever weights; raises what keeps it from serving."""
        ...

    async def load(self, snapshot: Path, version: int) -> None:
        """Put the weights of `snapshot` into every engine; their tokens carry `version` from then on."""
        ...

    def run_group_into(self, folder: Path | None) -> RunGroup:
        """Runs groups on these engines and writes them to `folder`."""
        ...

    async def stop(self) -> None:
        """End all of it; also what has only half started."""
        ...


class DedicatedScorer:
    """Starts the engines with the first snapshot, and anew after an evaluation that failed."""

    def __init__(self, scorer: DatasetScorer, *, serving: Callable[[], EvalServing]) -> None:
        """
        Args:
            serving: makes the engines and what belongs to them; called again after a failure.
        """
        self._scorer = scorer
        self._make = serving
        self._serving: EvalServing | None = None

    async def __call__(self, step: int, snapshot: Path) -> Sequence[DatasetScore]:
        try:
            if self._serving is None:
                self._serving = self._make()
                await self._serving.start()
            await self._serving.load(snapshot, step)
            scores = await self._scorer(step, self._serving.run_group_into)
        except BaseException:  # timeouts too: what did not answer in time may never
            await self.close()
            raise
        if all(part.score is None for part in scores):
            logger.warning("no dataset has a score: the engines of the evaluation are started anew for the next one")
            await self.close()
        return scores

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()
