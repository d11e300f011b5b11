"""Two or more runs side by side: final numbers, configuration keys that differ, charts with one line a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.monitor.base import TERMINAL_FATES
from miles_core.text import format_seconds, table, visible

from .charts import Chart, Rows, Series, column, drawable, thin
from .page import format_number, percent
from .run_data import RunData

LAST = 10
"""Steps that the final reward is averaged over."""
NOISE = 0.02
"""Relative differences up to this are neither better nor worse."""
MOST_DATASETS = 8
MOST_POINTS = 200
"""Of a line."""
UNITS = ((600.0, 1.0, "seconds"), (36_000.0, 60.0, "minutes"), (math.inf, 3600.0, "hours"))
"""Up to how many seconds, what one is, and its name."""
GAP = "logprob_gap/same_version_max"
_GROUPS = {"issued": "issued", **{fate: fate for fate in TERMINAL_FATES}, "open": "in_flight"}
_Show = Callable[[float], str]
Better = Literal["up", "down", ""]

_CHARTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Reward", "Mean of the episodes trained in each step.", "reward/mean", {"size": "wide"}),
    ("Demonstrations", "Mean negative log-probability of the tokens to imitate.", "loss/nll", {}),
    ("Episode length", "Sampled tokens of an episode, mean.", "episode/tokens", {"floor": 0}),
    ("Staleness", "Versions between an episode's oldest token and the weights that it trains, mean.", "staleness/mean",
     {"floor": 0}),
    ("Log-prob gap", "Maximum over tokens that the scoring weights sampled.", GAP, {"log": True}),
    ("Entropy", "Of the policy, in nats.", "entropy/mean", {"floor": 0}),
    ("Gradient", "Norm before clipping.", "optimizer/grad_norm", {"floor": 0}),
    ("Seconds a step", "Whole steps.", "time/step", {"floor": 0}),
    ("Throughput", "Tokens that all engines sample a second.", "engine/tokens_per_s", {"floor": 0}),
    ("Engines busy", "Share of the step.", "engine/utilisation", {"floor": 0, "ceiling": 1}),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """One number of one run, nan where it is not known."""

    number: float
    low: float = math.nan
    high: float = math.nan
    """An interval, where there is one."""

    def differs_from(self, other: Value) -> bool:
        """Whether both are known, differ by more than `NOISE`, and no intervals overlap."""
        if not (math.isfinite(self.number) and math.isfinite(other.number)):
            return False
        if abs(self.number - other.number) <= NOISE * max(abs(self.number), abs(other.number)):
            return False
        return not (self.low <= other.high and other.low <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One number of all runs."""

    name: str
    values: Sequence[Value]
    """[R], the first run first."""
    show: _Show
    better: Better = ""
    """Which direction is an improvement; empty where neither is."""

    def text(self, run: int) -> str:
        value = self.values[run]
        if not math.isfinite(value.number):
            return "\N{EN DASH}"
        ends = f" [{self.show(value.low)}, {self.show(value.high)}]" if math.isfinite(value.low) else ""
        return self.show(value.number) + ends

    def difference(self, run: int) -> str:
        """Against the first run; empty where one of them is not known."""
        first, other = self.values[0].number, self.values[run].number
        if not (math.isfinite(first) and math.isfinite(other)):
            return ""
        change = other - first
        if change == 0:
            return "same"
        sign = "+" if change > 0 else "\N{MINUS SIGN}"
        if self.show is percent:
            return f"{sign}{100 * abs(change):.2g} points"
        relative = f" ({sign}{percent(abs(change / first))})" if first and abs(change / first) < 10 else ""
        return f"{sign}{self.show(abs(change))}{relative}"

    def verdict(self, run: int) -> Literal["better", "worse", ""]:
        first, other = self.values[0], self.values[run]
        if not self.better or not other.differs_from(first):
            return ""
        return "better" if (other.number > first.number) == (self.better == "up") else "worse"


def lines(runs: Sequence[RunData]) -> list[Line]:
    """The final numbers; those that no run knows are left out."""
    scored = datasets(runs)
    found: list[Line] = []
    for same in zip(*(_numbers(run, scored) for run in runs), strict=True):
        name, _, show, better = same[0]
        known = [number for _, number, *_ in same]
        values = [one if isinstance(one, Value) else Value(math.nan if one is None else one) for one in known]
        if any(math.isfinite(value.number) for value in values):
            found.append(Line(name=name, values=values, show=show, better=better))
    return found


def datasets(runs: Sequence[RunData]) -> list[str]:
    """Held-out datasets with scores of their own, in the order in which they came."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    return [found[1] for name in names if (found := re.fullmatch("eval/(.+)/score", name))][:MOST_DATASETS]


def differing_keys(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Configuration keys whose values differ, with the value in each run; old keys by their new names."""
    from miles_core.config.layers import translate  # 0.4 s to import, which a report of one run does without

    flat = [dict(_flatten(translate(run.config))) for run in runs]
    rows = [(key, [one.get(key, "not set") for one in flat]) for key in sorted({key for one in flat for key in one})]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def names(runs: Sequence[RunData]) -> list[str]:
    """Short ones, unless two are alike."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def to_text(runs: Sequence[RunData]) -> str:
    """The numbers and the keys that differ, for a terminal."""
    labels = names(runs)
    others = range(1, len(runs))
    rows = [
        [line.name, line.text(0), *(cell for i in others for cell in (line.text(i), line.difference(i)))]
        for line in lines(runs)
    ]
    columns = ["", labels[0], *(cell for label in labels[1:] for cell in (label, "difference"))]
    blocks = [table(columns, rows)] if rows else ["None of these runs has logged a step."]
    if keys := differing_keys(runs):
        blocks += ["", table(["configuration", *labels], [[key, *values] for key, values in keys])]
    notes = [visible(f"{label}: {note}") for label, run in zip(labels, runs, strict=True) for note in run.notes]
    return "\n".join([*blocks, *([""] if notes else []), *notes])


def charts(runs: Sequence[RunData], labels: Sequence[str]) -> tuple[list[Chart], list[Chart]]:
    """The main charts with one line a run, those that no run has values for left out: over steps, and over wall time.

    Time counts from the first start of each run, in which nothing stands still: a run that was down shows.
    """
    rows = [_thinned(run) for run in runs]
    longest = max((known for some in rows for known in column(some, "elapsed") if math.isfinite(known)), default=0.0)
    _, unit, name = next(known for known in UNITS if longest < known[0])
    timed = [[{**row, "elapsed": row["elapsed"] / unit} for row in some if "elapsed" in row] for some in rows]
    scored = datasets(runs)
    return _charts(rows, labels, scored, "step", "step"), _charts(timed, labels, scored, "elapsed", name)


def _thinned(run: RunData) -> Rows:
    """With the seconds `elapsed` since the first start, or the first step of a run without a ledger."""
    begin = min(run.logged("time"), default=0.0)
    if run.ledger.history.starts:
        begin = min(begin, run.ledger.history.begin)
    elif run.rows:
        begin -= run.rows[0].get("time/step", 0.0)
    rows = [{**row, "elapsed": row["time"] - begin} if "time" in row else row for row in run.rows]
    return thin(rows, MOST_POINTS)


def _charts(runs: Sequence[Rows], labels: Sequence[str], scored: Sequence[str], x: str, x_name: str) -> list[Chart]:
    """One line of each run over the metric `x`."""
    places = [row[x] for rows in runs for row in rows]
    x_range = (min(places), max(places)) if places else None
    specs = [("Held-out score", "With 95 % intervals.", "eval/score", {"size": "wide"})]
    specs += [(f"Held-out score: {name}", "With 95 % intervals.", f"eval/{name}/score", {}) for name in scored]
    found: list[Chart] = []
    for title, note, metric, options in [*specs, *_CHARTS]:
        series: list[Series] = []
        for colour, (rows, label) in enumerate(zip(runs, labels, strict=True), start=1):
            known = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
            shape: dict[str, Any] = {}
            if metric.endswith("/score"):
                low, high = column(known, f"{metric}_low"), column(known, f"{metric}_high")
                shape = {"kind": "points", "low": low, "high": high}
            values = column(known, metric)
            series.append(Series(name=label, x=column(known, x), values=values, colour=colour, **shape))
        found.append(Chart(title=title, note=note, series=series, x_name=x_name, x_range=x_range, **options))
    return drawable(found)


def _numbers(run: RunData, scored: Sequence[str]) -> list[tuple[str, Value | float | None, _Show, Better]]:
    """Name, number, how it is shown, and which direction is better; the same names for every run."""
    logged, ledger = run.logged, run.ledger
    counts = ledger.counts if ledger.counts and ledger.counts.issued else None
    return [
        ("held-out score", _score(run, "eval/score"), _fixed, "up"),
        *((f"held-out score: {name}", _score(run, f"eval/{name}/score"), _fixed, "up") for name in scored),
        (f"reward, last {LAST} steps", _mean(logged("reward/mean")[-LAST:]), _fixed, "up"),
        (f"nats a token to imitate, last {LAST} steps", _mean(logged("loss/nll")[-LAST:]), _fixed, "down"),
        ("steps", run.rows[-1]["step"] if run.rows else None, _whole, ""),
        ("wall time", run.time.wall or _logged_wall(run), format_seconds, ""),
        ("seconds a step", _mean(logged("time/step")), format_number, "down"),
        ("tokens a second", _mean(logged("engine/tokens_per_s")), format_number, "up"),
        ("engines busy", _mean(logged("engine/utilisation")), percent, "up"),
        ("trainer busy", _mean(logged("trainer/utilisation")), percent, "up"),
        ("same-version log-prob gap, maximum", max(logged(GAP), default=None), format_number, "down"),
        ("effective training time", run.time.ratio, percent, "up"),
        ("wasted tokens", ledger.fates.wasted_share, percent, "down"),
        ("starts and rewinds", len(ledger.history.starts) or None, _whole, ""),
        *(
            (f"groups {name}", getattr(counts, fate) if counts else _last(logged(f"fate/{fate}")), _whole, "")
            for name, fate in _GROUPS.items()
        ),
    ]


def _score(run: RunData, name: str) -> Value:
    """The last held-out score, with its 95 % interval where it has one."""
    last = next((row for row in reversed(run.rows) if math.isfinite(row.get(name, math.nan))), {})
    return Value(*(last.get(one, math.nan) for one in (name, f"{name}_low", f"{name}_high")))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _logged_wall(run: RunData) -> float | None:
    times = run.logged("time")
    return times[-1] - times[0] + run.rows[0].get("time/step", 0.0) if times else None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """`{"run": {"steps": 3}}` -> `run.steps`, as JSON."""
    flat: list[tuple[str, str]] = []
    for key, value in config.items():
        inner = isinstance(value, Mapping) and value
        flat += _flatten(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", json.dumps(value))]
    return flat


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"
