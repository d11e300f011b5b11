"""Charts as data: which a report shows, from the rows of `metrics.jsonl`, and their axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, Literal, NamedTuple

from miles_core.monitor.base import TERMINAL_FATES
from miles_core.monitor.names import METRICS, describe

MOST_POINTS = 300
FATE_COLOURS = dict(zip(TERMINAL_FATES, (1, 3, 2, 4, 5), strict=True)) | {"buffered": 6, "in_flight": 7}
Rows = Sequence[Mapping[str, float]]

_IMITATION = "Mean negative log-probability of the tokens to imitate."
_VERSION, _LAG = "logprob_gap/version_", "logprob_gap/lag_"
_GAPS = {"maximum": "logprob_gap/max", "maximum, same version": "logprob_gap/same_version_max",
         "mean": "logprob_gap/mean"}  # fmt: skip
_PHASES = {name: f"sync/{name}_seconds" for name in ("pause", "write", "send", "load", "verify", "resume")}
_TIMES = {"wait for groups": "time/take_wait", "train": "time/train", "weight update": "time/sync",
          "evaluate, write": "time/on_step"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, set of points, or layer of a stack. Values that are nan are gaps."""

    name: str
    x: Sequence[float]
    values: Sequence[float]
    """[N], as many as `x`, which increases."""
    colour: int = 1
    """1 to 7, a colour of the style sheet; 7 is grey."""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    """[N] each: a band around a line, an error bar on points."""
    kind: Literal["line", "points"] = "line"


class Axis(NamedTuple):
    """The range of an axis, and the values on it that are worth a label."""

    start: float
    end: float
    ticks: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What one figure shows; the page's script draws it."""

    title: str
    note: str
    """One sentence under the title."""
    series: Sequence[Series]
    metrics: Sequence[str] = ()
    """Names of what it draws, families as `part/*`; the report shows all other metrics under "More"."""
    layout: Literal["lines", "stack", "bars"] = "lines"
    """stack and bars add the series up, which then share their x."""
    log: bool = False
    floor: float | None = None
    ceiling: float | None = None
    """The y axis reaches at least down to `floor` and up to `ceiling`."""
    limit: tuple[float, str] | None = None
    """A dashed line at a value, with its name."""
    size: Literal["wide", "normal", "small"] = "normal"
    unit: str = ""
    x_name: str = "step"
    """What the x axis counts."""
    x_range: tuple[float, float] | None = None
    """Of the x axis, where it shows more than the series."""

    def is_empty(self) -> bool:
        return not any(math.isfinite(value) for series in self.series for value in series.values)

    def to_data(self) -> dict[str, Any]:
        """For the script; without axes where there is nothing to draw."""
        data = _given(self, but=("metrics", "floor", "ceiling", "x_range"))
        data["series"] = [_given(series) for series in self.series]
        return data if self.is_empty() else data | {"x_axis": x_axis(self), "y_axis": y_axis(self)}


def main_charts(rows: Rows, *, warm_up: Rows = ()) -> list[Chart]:
    """The charts that every reader wants, none without values; `warm_up` are the steps of SFT before RL."""
    # fmt: off
    return drawable([
        _reward(rows),
        lines(rows, "Demonstrations", _IMITATION, {"nats a token": "loss/nll"}, size="wide"),
        lines(rows, "Episode length", "Tokens that the policy sampled in an episode.",
              {"mean": "episode/tokens", "maximum": "episode/tokens_max"}, floor=0),
        lines(rows, "Staleness", "Weight versions between an episode's oldest token and the weights that it trains.",
              {"mean": "staleness/mean", "maximum": "staleness/max"}, floor=0),
        _gap(rows),
        lines(_with_rest(rows), "Time of a step", "Seconds; engines go on generating meanwhile.",
              _TIMES | {"other": "other"}, colours=(7, 1, 2, 3, 6), metrics=("time/step", *_TIMES.values()),
              layout="bars", unit=" s"),
        lines(rows, "Weight update", "Seconds of each phase, on the slowest engine; sending and loading overlap.",
              _PHASES, colours=(7, 1, 3, 2, 5, 6), layout="bars", unit=" s"),
        lines(rows, "Pause for a weight update", "Seconds from the pause request until generation went on, on the "
              "engine that paused longest.", {"pause": "sync/pause_seconds", "whole update": "sync/total_seconds"},
              floor=0),
        lines(rows, "Fates", "What became of the groups issued so far.",
              {fate.replace("_", " "): f"fate/{fate}" for fate in FATE_COLOURS}, colours=tuple(FATE_COLOURS.values()),
              metrics=("fate/*",), layout="stack"),
        lines(rows, "Gradient", "Norm of the gradient before clipping: spikes come before a run falls apart.",
              {"norm": "optimizer/grad_norm"}, floor=0),
        lines(rows, "Throughput", "Tokens that all engines sample a second.", {"tokens/s": "engine/tokens_per_s"}),
        lines(rows, "Utilisation", "Share of the step in which each was busy.",
              {"engines": "engine/utilisation", "trainer": "trainer/utilisation"}, floor=0, ceiling=1),
        lines(warm_up, "Warm-up", "SFT before RL: mean negative log-probability of the tokens to imitate.",
              {"nats a token": "loss/nll"}),
    ])
    # fmt: on


def other_charts(rows: Rows, *, drawn: Iterable[Chart]) -> list[Chart]:
    """One small chart for every metric that the main charts leave out, in the catalogue's order."""
    used = ["step", "time", *(pattern for chart in drawn for pattern in chart.metrics)]
    names = [n for n in {n for row in rows for n in row} if not any(fnmatchcase(n, pattern) for pattern in used)]
    order = {name.split("/")[0]: i for i, name in enumerate(METRICS)}
    names.sort(key=lambda name: (order.get(name.split("/")[0], len(METRICS)), name))
    return [lines(rows, name, describe(name) or "", {name: name}, size="small") for name in names]


def lines(rows: Rows, title: str, note: str, named: Mapping[str, str], **options: Any) -> Chart:
    """A chart of those of `named`, label -> metric, that the run logged; of layers that are added up, above 0."""
    x = column(rows, "step")
    series = [
        Series(name=label, x=x, values=column(rows, name), colour=colour)
        for (label, name), colour in zip(named.items(), options.pop("colours", range(1, 8)), strict=False)
        if any(row.get(name, 0) > 0 if "layout" in options else name in row for row in rows)
    ]
    return Chart(title=title, note=note, series=series, **{"metrics": tuple(named.values()), **options})


def drawable(charts: Iterable[Chart]) -> list[Chart]:
    return [chart for chart in charts if not chart.is_empty()]


def column(rows: Rows, name: str) -> list[float]:
    return [row.get(name, math.nan) for row in rows]


def thin(rows: Rows, limit: int = MOST_POINTS) -> list[dict[str, float]]:
    """At most `limit` rows: neighbours are merged into their mean, maxima into the maximum, counts into the last."""
    if len(rows) <= limit:
        return [dict(row) for row in rows]
    bounds = [len(rows) * i // limit for i in range(limit + 1)]
    return [_merge(rows[a:b]) for a, b in itertools.pairwise(bounds)]


def by_lag(rows: Rows) -> list[dict[str, float]]:
    """`logprob_gap/version_7` of step 9 as `logprob_gap/lag_1`: step 9 trains, and therefore scores with, version 8."""
    return [{_by_lag(name, row["step"]): value for name, value in row.items()} for row in rows]


def y_axis(chart: Chart) -> Axis:
    """Round ends, every finite value inside."""
    values = [value for value in _extremes(chart) if math.isfinite(value)]
    if chart.log:
        return _log_axis([value for value in values if value > 0])
    values += [v for v in (chart.floor, chart.ceiling) if v is not None]
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):  # equal, or equal but for rounding
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / (2 if chart.size == "small" else 4))
    start, end = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(start, end, _multiples(step, start, end))


def x_axis(chart: Chart) -> Axis:
    """Whole steps; bars get half a step of room on both sides."""
    start, end = chart.x_range or (min(s.x[0] for s in chart.series if s.x), max(s.x[-1] for s in chart.series if s.x))
    room = 0.5 if chart.layout == "bars" or start == end else 0.0
    step = max(1.0, round(_round_step(max(end - start, 1) / (2 if chart.size == "small" else 6))))
    return Axis(start - room, end + room, _multiples(step, start, end))


def _by_lag(name: str, step: float) -> str:
    version = name.removeprefix(_VERSION)
    return f"{_LAG}{round(step) - 1 - int(version)}" if version != name and version.isdigit() else name


def _reward(rows: Rows) -> Chart:
    x, mean, std, score = (column(rows, name) for name in ("step", "reward/mean", "reward/std", "eval/score"))
    # The band stays among rewards that occurred: 0.9 ± 0.3 of a reward in [0, 1] does not reach 1.2.
    least = min((row["reward/min"] for row in rows if "reward/min" in row), default=-math.inf)
    most = max((row["reward/max"] for row in rows if "reward/max" in row), default=math.inf)
    low = [max(m - s, least) for m, s in zip(mean, std, strict=True)]
    high = [min(m + s, most) for m, s in zip(mean, std, strict=True)]
    series = [Series(name="training, mean ± standard deviation", x=x, values=mean, low=low, high=high)]
    if any(math.isfinite(value) for value in score):
        error = [0.0 if math.isnan(e) else e for e in column(rows, "eval/stderr")]
        low, high = ([s + sign * e for s, e in zip(score, error, strict=True)] for sign in (-1, 1))
        name = "held-out, ± standard error"
        series.append(Series(name=name, x=x, values=score, colour=2, kind="points", low=low, high=high))
    note = "Episodes trained in each step, and problems never trained on."
    metrics = ("reward/mean", "reward/std", "reward/min", "reward/max", "eval/score", "eval/stderr")
    return Chart(title="Reward", note=note, series=series, metrics=metrics, size="wide")


def _gap(rows: Rows) -> Chart:
    lags = sorted({name for row in rows for name in row if name.startswith(_LAG)})
    named = _GAPS | {f"mean, lag {name.removeprefix(_LAG)}": name for name in lags}
    note = (
        "|log p(trainer) \N{MINUS SIGN} log p(engine)| of sampled tokens. Lag 0: the very weights that score them "
        "sampled them, so the gap is numerics alone and belongs below the line."
    )
    options = {"metrics": ("logprob_gap/*",), "log": True, "limit": (1e-4, "1e-4")}
    return lines(rows, "Log-prob gap", note, named, colours=(4, 2, 1, 3, 5, 6, *[7] * len(lags)), **options)


def _with_rest(rows: Rows) -> Rows:
    """With `other`: what of a step's time none of its parts took."""

    def known(row: Mapping[str, float]) -> float:
        return math.fsum(v for name in _TIMES.values() if math.isfinite(v := row.get(name, 0.0)))

    if not any(map(known, rows)):
        return rows
    return [{**row, "other": max(row["time/step"] - known(row), 0.0)} if "time/step" in row else row for row in rows]


def _merge(rows: Rows) -> dict[str, float]:
    merged = {"step": rows[-1]["step"]}
    for name in set[str]().union(*rows) - {"step"}:
        values = [value for row in rows if not math.isnan(value := row.get(name, math.nan))]
        kind = "last" if name.startswith("fate/") else name[-3:]
        merge = {"last": lambda values: values[-1], "max": max, "min": min}.get(kind, fmean)
        merged[name] = merge(values) if values else math.nan
    return merged


def _given(record: Any, *, but: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    given = {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
    return {name: value for name, value in given.items() if name not in but}


def _extremes(chart: Chart) -> Iterable[float]:
    if chart.layout != "lines":
        layers = zip(*(series.values for series in chart.series), strict=True)
        return [0.0, *(sum(v for v in layer if math.isfinite(v)) for layer in layers)]
    limit = [chart.limit[0]] if chart.limit else []
    return itertools.chain(limit, *((*s.values, *(s.low or ()), *(s.high or ())) for s in chart.series))


def _log_axis(values: Sequence[float]) -> Axis:
    if not values:
        return Axis(0.1, 1.0, (0.1, 1.0))
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 5))
    return Axis(10.0**low, 10.0**high, [10.0**p for p in range(low, high + 1, every)])


def _round_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times 10^n that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _multiples(step: float, start: float, end: float) -> list[float]:
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [n * step for n in range(first, last + 1)]
