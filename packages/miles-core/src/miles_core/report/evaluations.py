"""Held-out scores by dataset, with intervals, lag, and the points that were skipped."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.ledger import queries
from miles_core.monitor.summary import format_seconds

from .chart import Chart, Series
from .markup import plural, section, table
from .svg import draw

MOST = 1000
"""Points that are read, the newest ones."""
IN_TABLE = 40
MOST_DATASETS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one evaluation said about one dataset."""

    dataset: str
    """`*` for an evaluation that was skipped as a whole."""
    step: int
    lag: int
    """Steps that training had gone on when the score was there."""
    score: float | None
    low: float | None
    high: float | None
    """The 95 % confidence interval, where there is one."""
    reason: str
    """Why there is no score."""
    seconds: float
    is_live: bool
    """Whether the run still stands on these weights."""


def read_evaluations(db: sqlite3.Connection) -> list[Point]:
    """The newest points in the order in which they came."""
    went_back = queries.rewinds(db)
    points: list[Point] = []
    for dataset, step, logged, score, reason, seconds, metrics, start in db.execute(
        "SELECT dataset, version, logged_version, score, reason, seconds, metrics, start FROM evaluations "
        f"ORDER BY evaluation DESC LIMIT {MOST}"
    ):
        low, high = _interval(dataset, metrics)
        points.append(
            Point(
                dataset=dataset,
                step=step,
                lag=max(logged - step, 0),
                score=score,
                low=low,
                high=high,
                reason=reason,
                seconds=seconds,
                is_live=all(later <= start or to >= step for later, to in went_back),
            )
        )
    return points[::-1]


def evaluations_section(points: Sequence[Point]) -> str:
    if not points:
        return ""
    names = list(dict.fromkeys(point.dataset for point in points if point.score is not None and point.is_live))
    charts = "".join(draw(chart(name, points)) for name in names[:MOST_DATASETS])
    more = f" {len(names) - MOST_DATASETS} more datasets are in the ledger." if len(names) > MOST_DATASETS else ""
    skipped = sum(point.score is None for point in points)
    lags = [point.lag for point in points if point.score is not None]
    note = f"{plural(len(points), 'point')}, {skipped} of them skipped"
    note += f"; scores came up to {plural(max(lags), 'step')} late." if lags and max(lags) else "."
    rows = [_row(point) for point in points[-IN_TABLE:][::-1]]
    told = table(["step", "dataset", "score", "95 % interval", "lag", "took", "remark"], rows, numbers=range(2, 6))
    summary = f"<summary>All points <small>the newest {len(rows)}, newest first</small></summary>"
    shown = f"<details{' open' if skipped else ''}>{summary}{told}</details>"
    grid = f'<div class="charts">{charts}</div>' if charts else ""
    return section("Evaluation", note + more, grid, shown)


def chart(dataset: str, points: Sequence[Point]) -> Chart:
    """The last score of each step on the surviving lineage."""
    by_step = {p.step: p for p in points if p.dataset == dataset and p.score is not None and p.is_live}
    kept = [by_step[step] for step in sorted(by_step)]
    return Chart(
        title="Held-out score" if dataset == "eval" else f"Held-out score: {dataset}",
        note="Bars are 95 % confidence intervals, clustered by prompt.",
        x=[float(point.step) for point in kept],
        series=[
            Series(
                name="score, 95 % interval",
                values=[_number(point.score) for point in kept],
                low=[_number(point.low) for point in kept],
                high=[_number(point.high) for point in kept],
                colour=2,
                kind="points",
            ),
        ],
    )


def _row(point: Point) -> list[str]:
    interval = "" if point.low is None or point.high is None else f"{point.low:.3f} \N{EN DASH} {point.high:.3f}"
    remark = point.reason or ("" if point.is_live else "of weights that a rewind took back")
    return [
        f"{point.step}",
        "all" if point.dataset == "*" else point.dataset,
        "skipped" if point.score is None else f"{point.score:.4f}",
        interval,
        plural(point.lag, "step") if point.lag else "",
        format_seconds(point.seconds),
        remark,
    ]


def _interval(dataset: str, metrics: str) -> tuple[float | None, float | None]:
    known = json.loads(metrics)
    if not isinstance(known, dict):
        return None, None
    prefix = "eval" if dataset in ("eval", "external") else f"eval/{dataset}"
    low, high = (known.get(f"{prefix}/score_{end}") for end in ("low", "high"))
    return (low, high) if isinstance(low, int | float) and isinstance(high, int | float) else (None, None)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
