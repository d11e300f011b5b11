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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One evaluation of one version of the weights. A step and the version that it made have the same number."""

    step: int
    """The step whose weights were evaluated."""
    scores: tuple[DatasetScore, ...]
    """Empty where it was skipped."""
    lag_steps: int
    """Steps that training went on while it was evaluated."""
    seconds: float
    """From the moment it was due to its end."""

    @property
    def score(self) -> float | None:
        """The mean over datasets; None unless every dataset has a score, for means of fewer would not compare."""
        found = [s.score for s in self.scores if s.score is not None]
        return sum(found) / len(found) if found and len(found) == len(self.scores) else None

    def metrics(self) -> dict[str, float]:
        """For the row of `step`. A score that does not exist is absent, never 0."""
        merged = {name: value for scored in self.scores for name, value in scored.metrics.items()}
        if len(self.scores) > 1 and self.score is not None:
            merged["eval/score"] = self.score
        merged |= {"eval/lag_steps": float(self.lag_steps), "eval/seconds": self.seconds}
        skipped = sum(scored.score is None for scored in self.scores) if self.scores else 1
        return merged | ({"eval/skipped": float(skipped)} if skipped else {})


class EvalLog:
    """Records every point of a run in ledger, log file and trace; its metrics are the caller's to log."""

    def __init__(self, *, ledger: Ledger, monitor: Monitor, present_step: Callable[[], int]) -> None:
        """
        Args:
            present_step: the last one that training has made, for the lag.
        """
        self._ledger = ledger
        self._monitor = monitor
        self._present_step = present_step

    def scored(self, step: int, scores: Sequence[DatasetScore], *, began: float) -> EvalPoint:
        """The evaluation that was due at `began` (seconds since the epoch) came to an end."""
        ended, present = time.time(), self._present_step()
        lag = max(present - step, 0)
        point = EvalPoint(step=step, scores=tuple(scores), lag_steps=lag, seconds=ended - began)
        self._monitor.event("evaluate", began, ended, "eval")
        for scored in scores:
            if scored.score is not None:
                logger.info("step %d, %d steps later: %s", step, lag, scored.text)
            else:
                logger.warning("step %d has no score on %s: %s", step, scored.dataset, scored.reason)
            self._record(step, scored, present, point.seconds)
        return point

    def skipped(self, step: int, reason: str, *, began: float) -> EvalPoint:
        """It did not, for `reason`: one line."""
        point = self.scored(step, (), began=began)
        logger.warning("the evaluation of step %d is skipped: %s", step, reason)
        everything = DatasetScore(dataset="*", score=None, metrics={}, reason=reason)
        self._record(step, everything, self._present_step(), point.seconds)
        return point

    def failed(self, step: int, error: Exception, doing: str, *, timeout_s: float, began: float) -> EvalPoint:
        """`error` came up while `doing` something for it."""
        found = cause(error)
        if isinstance(found, TimeoutError) and not str(found):
            return self.skipped(step, f"{doing} took longer than `eval.timeout_s` = {timeout_s:g} s", began=began)
        return self.skipped(step, f"{doing}: {type(found).__name__}: {first_line(str(found))}", began=began)

    def _record(self, step: int, scored: DatasetScore, present: int, seconds: float) -> None:
        self._ledger.evaluated(
            scored.dataset,
            version=step,
            logged_version=present,
            score=scored.score,
            reason=scored.reason,
            seconds=seconds,
            metrics=scored.metrics,
        )
