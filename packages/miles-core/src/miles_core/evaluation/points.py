"""Evaluation points: what a step's weights scored, or why they have no score, and where that is recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_rollout.errors import first_line

from miles_core.errors import cause
from miles_core.monitor import Monitor

if TYPE_CHECKING:
    from miles_core.durable.ledger import Ledger

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetScore:
    """What came of one dataset."""

    dataset: str
    score: float | None
    """None where there is no score; then there is a `reason`."""
    metrics: Mapping[str, float]
    """By full name, `eval/…`."""
    reason: str = ""
    text: str = ""
    """One line for people."""


class EvalLog:
    """Records every point of a run in ledger, log file and trace, and returns its metrics; the evaluators call it.

    A step and the version of the weights that it made have the same number.
    """

    def __init__(self, *, ledger: Ledger, monitor: Monitor, present_step: Callable[[], int]) -> None:
        """
        Args:
            present_step: the last one that training has made, for the lag.
        """
        self._ledger = ledger
        self._monitor = monitor
        self._present_step = present_step

    def scored(self, step: int, scores: Sequence[DatasetScore], *, began: float) -> dict[str, float]:
        """The evaluation of the weights of `step`, due at `began` (seconds since the epoch), came to an end.

        Returns:
            metrics for the row of `step`. A score that does not exist is absent, never 0.
        """
        return self._record(step, scores, scores, began)

    def skipped(self, step: int, reason: str, *, began: float) -> dict[str, float]:
        """It did not, for `reason`: one line."""
        logger.warning("the evaluation of step %d is skipped: %s", step, reason)
        return self._record(step, (), [DatasetScore(dataset="*", score=None, metrics={}, reason=reason)], began)

    def failed(self, step: int, error: Exception, doing: str, *, timeout_s: float, began: float) -> dict[str, float]:
        """`error` came up while `doing` something for it."""
        found = cause(error)
        if isinstance(found, TimeoutError) and not str(found):
            return self.skipped(step, f"{doing} took longer than `eval.timeout_s` = {timeout_s:g} s", began=began)
        return self.skipped(step, f"{doing}: {type(found).__name__}: {first_line(str(found))}", began=began)

    def _record(
        self, step: int, scores: Sequence[DatasetScore], rows: Sequence[DatasetScore], began: float
    ) -> dict[str, float]:
        ended, present = time.time(), self._present_step()
        lag, seconds = max(present - step, 0), ended - began
        self._monitor.event("evaluate", began, ended, "eval")
        for scored in scores:
            if scored.score is not None:
                logger.info("step %d, %d steps later: %s", step, lag, scored.text)
            else:
                logger.warning("step %d has no score on %s: %s", step, scored.dataset, scored.reason)
        for row in rows:
            self._ledger.evaluated(
                row.dataset,
                version=step,
                logged_version=present,
                score=row.score,
                reason=row.reason,
                seconds=seconds,
                metrics=row.metrics,
            )
        found = [row.score for row in rows if row.score is not None]
        metrics = {name: value for scored in scores for name, value in scored.metrics.items()}
        if len(rows) == len(found) > 1:  # a mean over fewer datasets would not compare
            metrics["eval/score"] = sum(found) / len(found)
        if len(found) < len(rows):
            metrics["eval/skipped"] = float(len(rows) - len(found))
        return metrics | {"eval/lag_steps": float(lag), "eval/seconds": seconds}
