"""What two or more runs came to, side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.ledger import table
from miles_core.monitor.summary import TERMINAL_FATES, format_seconds
from miles_core.text import visible

from .chart import format_number
from .markup import percent
from .read import RunData

LAST = 10
"""Steps that the final reward is averaged over."""

NOISE = 0.02
"""Relative differences up to this are neither better nor worse."""

MOST_DATASETS = 8
_DATASET = re.compile(r"eval/.+/score")

Better = Literal["up", "down", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    show: Callable[[float], str]
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
    found = [
        _line(runs, "held-out score", _score(), _fixed, "up"),
        *(_line(runs, f"held-out score: {name}", _score(f"{name}/"), _fixed, "up") for name in datasets(runs)),
        _line(runs, f"reward, last {LAST} steps", _recent("reward/mean"), _fixed, "up"),
        _line(runs, f"nats a token to imitate, last {LAST} steps", _recent("loss/nll"), _fixed, "down"),
        _line(runs, "steps", lambda run: Value(number=run.rows[-1]["step"] if run.rows else math.nan), _whole),
        _line(runs, "wall time", _wall, format_seconds),
        _line(runs, "seconds a step", _mean("time/step"), format_number, "down"),
        _line(runs, "tokens a second", _mean("engine/tokens_per_s"), format_number, "up"),
        _line(runs, "engines busy", _mean("engine/utilisation"), percent, "up"),
        _line(runs, "trainer busy", _mean("trainer/utilisation"), percent, "up"),
        _line(runs, "same-version log-prob gap, maximum", _gap, format_number, "down"),
        _line(runs, "effective training time", _effective, percent, "up"),
        _line(runs, "wasted tokens", _wasted, percent, "down"),
        _line(runs, "starts and rewinds", _starts, _whole),
        _line(runs, "groups issued", _fate("issued"), _whole),
        *(_line(runs, f"groups {fate}", _fate(fate), _whole) for fate in TERMINAL_FATES),
        _line(runs, "groups open", _fate("in_flight"), _whole),
    ]
    return [line for line in found if any(math.isfinite(value.number) for value in line.values)]


def datasets(runs: Sequence[RunData]) -> list[str]:
    """Held-out datasets with scores of their own, in the order in which they came."""
    found = dict.fromkeys(name for run in runs for row in run.rows for name in row if _DATASET.fullmatch(name))
    return [name.split("/", 1)[1].removesuffix("/score") for name in found][:MOST_DATASETS]


def differing_keys(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Configuration keys whose values differ, with the value in each run."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key, "not set") for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def names(runs: Sequence[RunData]) -> list[str]:
    """Short ones, unless two are alike."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def to_text(runs: Sequence[RunData]) -> str:
    """The numbers and the keys that differ, for a terminal."""
    labels = names(runs)
    rows = [
        [line.name, line.text(0), *(part for i in range(1, len(runs)) for part in (line.text(i), line.difference(i)))]
        for line in lines(runs)
    ]
    columns = ["", labels[0], *(part for label in labels[1:] for part in (label, "difference"))]
    parts = [table(columns, rows)] if rows else ["None of these runs has logged a step."]
    keys = differing_keys(runs)
    parts += ["", table(["configuration", *labels], [[key, *values] for key, values in keys])] if keys else []
    notes = [visible(f"{label}: {note}") for label, run in zip(labels, runs, strict=True) for note in run.notes]
    return "\n".join([*parts, *([""] if notes else []), *notes])


# ---- where each number comes from


def _line(
    runs: Sequence[RunData],
    name: str,
    value: Callable[[RunData], Value],
    show: Callable[[float], str],
    better: Better = "",
) -> Line:
    return Line(name=name, values=[value(run) for run in runs], show=show, better=better)


def _score(dataset: str = "") -> Callable[[RunData], Value]:
    """The last held-out score, with its 95 % interval where it has one."""
    name = f"eval/{dataset}score"

    def value(run: RunData) -> Value:
        rows = [row for row in run.rows if math.isfinite(row.get(name, math.nan))]
        if not rows:
            return Value(number=math.nan)
        last = rows[-1]
        low, high = last.get(f"{name}_low", math.nan), last.get(f"{name}_high", math.nan)
        return Value(number=last[name], low=low, high=high)

    return value


def _recent(name: str) -> Callable[[RunData], Value]:
    """The mean of the last steps."""

    def value(run: RunData) -> Value:
        known = [row[name] for row in run.rows if math.isfinite(row.get(name, math.nan))][-LAST:]
        return Value(number=math.fsum(known) / len(known) if known else math.nan)

    return value


def _wall(run: RunData) -> Value:
    split = run.time()
    if split is not None and split.wall > 0:
        return Value(number=split.wall)
    times = [row["time"] for row in run.rows if "time" in row]
    return Value(number=times[-1] - times[0] + run.rows[0].get("time/step", 0.0) if times else math.nan)


def _mean(name: str) -> Callable[[RunData], Value]:
    def value(run: RunData) -> Value:
        known = [row[name] for row in run.rows if math.isfinite(row.get(name, math.nan))]
        return Value(number=math.fsum(known) / len(known) if known else math.nan)

    return value


def _gap(run: RunData) -> Value:
    name = "logprob_gap/same_version_max"
    known = [row[name] for row in run.rows if math.isfinite(row.get(name, math.nan))]
    return Value(number=max(known, default=math.nan))


def _effective(run: RunData) -> Value:
    split = run.time()
    return Value(number=math.nan if split is None or split.ratio is None else split.ratio)


def _wasted(run: RunData) -> Value:
    if run.book is None or not run.book.fates.sampled:
        return Value(number=math.nan)
    return Value(number=run.book.fates.num_wasted / run.book.fates.sampled)


def _starts(run: RunData) -> Value:
    return Value(number=math.nan if run.book is None else float(len(run.book.course.starts)))


def _fate(name: str) -> Callable[[RunData], Value]:
    """Of the ledger, or the last one logged."""

    def value(run: RunData) -> Value:
        if run.book is not None:
            counts = run.book.fates.counts()
            return Value(number=float(counts[name]))
        known = [row[f"fate/{name}"] for row in run.rows if f"fate/{name}" in row]
        return Value(number=known[-1] if known else math.nan)

    return value


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """`{"run": {"steps": 3}}` -> `run.steps`, as JSON."""
    flat: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", json.dumps(value)))
    return flat


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"
