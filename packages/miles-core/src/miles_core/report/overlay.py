"""Charts with one line a run, over steps and over wall time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .chart import Chart, Series
from .compare import datasets
from .read import RunData

MOST_POINTS = 200
UNITS = ((600.0, 1.0, "seconds"), (36_000.0, 60.0, "minutes"), (math.inf, 3600.0, "hours"))
"""Up to how many seconds, what one is, and its name."""

Points = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""[N] x, increasing, and [N] values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    title: str
    note: str
    metric: str
    low: str = ""
    high: str = ""
    """Metrics that hold the ends of an interval; with them it is drawn as points."""
    log: bool = False
    floor: float | None = None
    ceiling: float | None = None
    wide: bool = False


_CHARTS = (
    _Drawn(title="Held-out score", note="With 95 % intervals.", metric="eval/score", low="eval/score_low",
           high="eval/score_high", wide=True),
    _Drawn(title="Reward", note="Mean of the episodes trained in each step.", metric="reward/mean", wide=True),
    _Drawn(title="Demonstrations", note="Mean negative log-probability of the tokens to imitate.", metric="loss/nll"),
    _Drawn(title="Episode length", note="Sampled tokens of an episode, mean.", metric="episode/tokens", floor=0),
    _Drawn(title="Staleness", note="Versions between an episode's oldest token and the weights that it trains, mean.",
           metric="staleness/mean", floor=0),
    _Drawn(title="Log-prob gap", note="Maximum over tokens that the scoring weights sampled.",
           metric="logprob_gap/same_version_max", log=True),
    _Drawn(title="Entropy", note="Of the policy, in nats.", metric="entropy/mean", floor=0),
    _Drawn(title="Gradient", note="Norm before clipping.", metric="optimizer/grad_norm", floor=0),
    _Drawn(title="Seconds a step", note="Whole steps.", metric="time/step", floor=0),
    _Drawn(title="Throughput", note="Tokens that all engines sample a second.", metric="engine/tokens_per_s", floor=0),
    _Drawn(title="Engines busy", note="Share of the step.", metric="engine/utilisation", floor=0, ceiling=1),
)  # fmt: skip


def by_step(runs: Sequence[RunData], labels: Sequence[str]) -> list[Chart]:
    """The main charts over steps; those that no run has values for are left out."""
    steps = [np.array([row["step"] for row in run.rows]) for run in runs]
    return _charts(runs, labels, steps, x_name="step")


def by_time(runs: Sequence[RunData], labels: Sequence[str]) -> list[Chart]:
    """The same over the time since each run's first start, in which nothing stands still: a run that was down shows."""
    seconds = [_since_start(run) for run in runs]
    longest = max((float(one[-1]) for one in seconds if len(one)), default=0.0)
    _, unit, name = next(known for known in UNITS if longest < known[0])
    return _charts(runs, labels, [one / unit for one in seconds], x_name=name)


def _charts(
    runs: Sequence[RunData], labels: Sequence[str], places: Sequence[npt.NDArray[np.float64]], *, x_name: str
) -> list[Chart]:
    grid = _grid(places)
    if not len(grid):
        return []
    first, *others = _CHARTS
    scores = [_of_dataset(name) for name in datasets(runs)]
    charts = [_chart(drawn, runs, labels, places, grid, x_name) for drawn in (first, *scores, *others)]
    return [chart for chart in charts if not chart.is_empty()]


def _of_dataset(name: str) -> _Drawn:
    score = f"eval/{name}/score"
    return _Drawn(
        title=f"Held-out score: {name}",
        note="With 95 % intervals.",
        metric=score,
        low=f"{score}_low",
        high=f"{score}_high",
    )


def _chart(
    drawn: _Drawn,
    runs: Sequence[RunData],
    labels: Sequence[str],
    places: Sequence[npt.NDArray[np.float64]],
    grid: npt.NDArray[np.float64],
    x_name: str,
) -> Chart:
    series: list[Series] = []
    for i, (run, label, x) in enumerate(zip(runs, labels, places, strict=True)):
        ends = {}
        if drawn.low:
            ends = {
                "kind": "points",
                "low": on_grid(x, _column(run.rows, drawn.low), grid, bridge=False),
                "high": on_grid(x, _column(run.rows, drawn.high), grid, bridge=False),
            }
        values = on_grid(x, _column(run.rows, drawn.metric), grid, bridge=not drawn.low)
        series.append(Series(name=label, values=values, colour=i + 1, **ends))
    return Chart(
        title=drawn.title,
        note=drawn.note,
        x=grid.tolist(),
        x_name=x_name,
        series=series,
        log=drawn.log,
        floor=drawn.floor,
        ceiling=drawn.ceiling,
        size="wide" if drawn.wide else "normal",
    )


def on_grid(
    x: npt.NDArray[np.float64], values: npt.NDArray[np.float64], grid: npt.NDArray[np.float64], *, bridge: bool
) -> list[float]:
    """[G] the mean of the values whose nearest place of the grid it is; nan where there is none.

    Args:
        bridge: between two that are known, the straight line that a chart would draw; so the pointer finds a value.
    """
    known = np.isfinite(values) & np.isfinite(x)
    index = np.searchsorted((grid[1:] + grid[:-1]) / 2, x[known])
    counts = np.bincount(index, minlength=len(grid))
    sums = np.bincount(index, weights=values[known], minlength=len(grid))
    found = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    there = np.flatnonzero(counts)
    if bridge and len(there):
        inside = slice(there[0], there[-1] + 1)
        found[inside] = np.interp(grid[inside], grid[there], found[there])
    return found.tolist()


def _grid(places: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Every place where there are few, else places at even distances."""
    every = np.unique(np.concatenate([one[np.isfinite(one)] for one in places])) if places else np.array([])
    return every if len(every) <= MOST_POINTS else np.linspace(every[0], every[-1], MOST_POINTS)


def _since_start(run: RunData) -> npt.NDArray[np.float64]:
    times = np.array([row.get("time", math.nan) for row in run.rows])
    if not np.isfinite(times).any():
        return times
    begin = float(np.nanmin(times))
    if run.book is not None and run.book.course.starts:
        begin = min(begin, run.book.course.begin)
    elif run.rows:
        begin -= run.rows[0].get("time/step", 0.0)
    return times - begin


def _column(rows: Sequence[Mapping[str, float]], name: str) -> npt.NDArray[np.float64]:
    return np.array([row.get(name, math.nan) for row in rows])
