"""Evaluation on engines of its own, which load each snapshot of the weights; training never waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .points import DatasetScore
from .scoring import DatasetScorer

if TYPE_CHECKING:
    from miles_core.cluster import EvalEngines

logger = logging.getLogger(__name__)


class DedicatedScorer:
    """Scores snapshots on `EvalEngines`: starts them with the first one, and anew after an evaluation that failed."""

    def __init__(self, scorer: DatasetScorer, *, serving: Callable[[], EvalEngines]) -> None:
        """
        Args:
            serving: makes the engines and what belongs to them; called again after a failure.
        """
        self._scorer = scorer
        self._make = serving
        self._serving: EvalEngines | None = None

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
