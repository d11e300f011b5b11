"""Evaluation points: what a step's weights scored, or why they have no score, and everybody who is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_core.monitor import Monitor

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
    reason: str
    """Why there is no score at all; empty where there is one."""
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
        merged = {name: value for part in self.scores for name, value in part.metrics.items()}
        if len(self.scores) > 1 and self.score is not None:
            merged["eval/score"] = self.score
        merged |= {"eval/lag_steps": float(self.lag_steps), "eval/seconds": self.seconds}
        skipped = sum(part.score is None for part in self.scores) if self.scores else 1
        return merged | ({"eval/skipped": float(skipped)} if skipped else {})


class EvalSink(Protocol):
    """Keeps evaluations for good: the ledger."""

    def evaluated(
        self,
        dataset: str,
        *,
        version: int,
        logged_version: int,
        score: float | None,
        reason: str,
        seconds: float,
        metrics: Mapping[str, float],
    ) -> None: ...


class EvalLog:
    """Takes every point of a run and tells ledger, log file and trace; metrics it returns."""

    def __init__(self, *, sink: EvalSink, monitor: Monitor, present_step: Callable[[], int]) -> None:
        """
        Args:
            present_step: the last one that training has made, for the lag.
        """
        self._sink = sink
        self._monitor = monitor
        self._present_step = present_step
        self.points: list[EvalPoint] = []

    def scored(self, step: int, scores: Sequence[DatasetScore], *, began: float) -> EvalPoint:
        """The evaluation that was due at `began` (seconds since the epoch) came to an end."""
        reason = "" if any(part.score is not None for part in scores) else "; ".join(part.reason for part in scores)
        return self._record(step, tuple(scores), reason, began)

    def skipped(self, step: int, reason: str, *, began: float) -> EvalPoint:
        """It did not, for `reason`: one line."""
        return self._record(step, (), reason, began)

    def rewind(self, step: int) -> None:
        """Points of later steps belong to weights that are gone; the ledger keeps them."""
        self.points = [point for point in self.points if point.step <= step]

    def _record(self, step: int, scores: tuple[DatasetScore, ...], reason: str, began: float) -> EvalPoint:
        ended, present = time.time(), self._present_step()
        point = EvalPoint(
            step=step, scores=scores, reason=reason, lag_steps=max(present - step, 0), seconds=ended - began
        )
        self.points.append(point)
        self._monitor.event("evaluate", began, ended, "eval")
        if not scores:
            logger.warning("the evaluation of step %d is skipped: %s", step, reason)
        for part in scores or (DatasetScore(dataset="*", score=None, metrics={}, reason=reason),):
            if part.score is not None:
                logger.info("step %d, %d steps later: %s", step, point.lag_steps, part.text)
            elif scores:
                logger.warning("step %d has no score on %s: %s", step, part.dataset, part.reason)
            self._sink.evaluated(
                part.dataset,
                version=step,
                logged_version=present,
                score=part.score,
                reason=part.reason,
                seconds=point.seconds,
                metrics=part.metrics,
            )
        return point
