"""What the wall time of a run went into, and a timeline of who worked when.

Every second between the first start and the last event is of exactly one kind:

- *steps*: the steps of the surviving lineage, each from the moment it began to wait for groups until the engines held
  its weights. Their share is the effective training time ratio. Waiting belongs to a step: the engines generate then.
- *paused*: the part of those steps in which no engine served.
- *lost*: steps that a rewind left behind, and the beginning of a step that the end of a process cut off.
- *start-up*: from a start to its first step, and from the death of a trainer rank to the rewind.
- *evaluation* and *checkpoint*: between steps, while training waited for one. Evaluation beside training costs nothing.
- *down*: from the last event of a process to the next start.
- *other*: what is left between steps, and behind the last one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import gmtime, strftime
from typing import Any

import numpy as np

from .history import Floats, RunHistory, Span, Start
from .page import clock

KINDS = ("steps", "lost", "start-up", "evaluation", "checkpoint", "paused", "down", "other")
WITHIN_STEP = ("time/take_wait", "time/train", "time/sync")
"""Metrics of what a step spends its time on."""
BINS = 240
"""Of a timeline, so that a week fits on the page."""
MOST_MARKS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """The wall time of a run by kind."""

    seconds: Mapping[str, float]
    """Of each kind in `KINDS`; they add up to the wall time."""
    within: Mapping[str, float]
    """Of each metric in `WITHIN_STEP`, over the surviving steps."""

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float | None:
        """The effective training time ratio; None before anything happened."""
        return self.seconds["steps"] / self.wall if self.wall > 0 else None


def split_time(history: RunHistory, rows: Sequence[Mapping[str, float]]) -> TimeSplit:
    """Sort every second of a run; rows of `metrics.jsonl` say what a checkpoint cost and what a step did."""
    by_step = {round(row["step"]): row for row in rows}
    pieces = list(_pieces(history))
    windows = np.array([(begin, end) for begin, end, _, _ in pieces], dtype=np.float64).reshape(-1, 2)
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    evaluated, paused = covered(history.evaluations, windows), covered(history.pauses, windows)
    for (begin, end, kind, step), in_evaluation, in_pause in zip(pieces, evaluated, paused, strict=True):
        row = by_step.get(step, {})
        saved = row.get("time/checkpoint", 0.0) + row.get("time/checkpoint_wait", 0.0)
        parts = {
            "paused": float(in_pause) if kind == "steps" else 0.0,
            "evaluation": float(in_evaluation) if kind in ("start-up", "other") else 0.0,
        }
        parts["checkpoint"] = min(saved, end - begin - parts["evaluation"]) if kind == "other" else 0.0
        for name, part in [*parts.items(), (kind, end - begin - sum(parts.values()))]:
            seconds[name] += part
    steps = [row for row in rows if "time/step" in row]
    return TimeSplit(
        seconds={kind: max(value, 0.0) for kind, value in seconds.items()},
        within={name: sum(row.get(name, 0.0) for row in steps) for name in WITHIN_STEP},
    )


def make_timeline(
    history: RunHistory, groups: Mapping[str, Floats], rows: Sequence[Mapping[str, float]]
) -> dict[str, Any] | None:
    """Lanes of what was at work when, cut into bins of equal time; None where there is nothing to show.

    The `heat` of a lane is 0 to 1 for each bin: of the `peak` of groups at once, or without one a share of the time.

    Args:
        history: empty where there is no ledger; the lanes of trainer and weight update then come from `rows` alone.
        groups: worker -> [N, 2] when its groups ran.
        rows: of `metrics.jsonl`, and those that rewinds left behind, by time.
    """
    done = [row for row in rows if {"time", "time/step"} <= row.keys()]
    begins, ends = [row["time"] - row["time/step"] for row in done], [row["time"] for row in done]
    if history.starts:
        begins, ends = [history.begin], [*ends, history.end]
    begin, whole = min(begins, default=0.0), max(ends, default=0.0) - min(begins, default=0.0)
    if whole <= 0:
        return None
    edges = np.linspace(begin, begin + whole, BINS + 1)
    running = {name: load(spans, edges) for name, spans in groups.items()}
    peak = max((float(one.max()) for one in running.values()), default=0.0) or 1.0
    saved = [(s.at, s.committed_at) for s in history.steps if s.has_checkpoint and s.committed_at is not None]
    busy = {  # utilisation is logged as one number a step
        "engines": [(r["time"] - r["time/step"] * min(r.get("engine/utilisation", 0.0), 1.0), r["time"]) for r in done],
        "trainer": _phase(done, "time/train", after=("time/sync", "time/on_step")),
        "weight update": _phase(done, "time/sync", after=("time/on_step",)),
        "evaluation": history.evaluations,
        "checkpoints": saved,
        "no engine served": history.pauses,
    }
    lanes = [(name, one / peak, peak) for name, one in running.items()]
    lanes += [(name, load(union(spans), edges).clip(0, 1), None) for name, spans in busy.items()]
    return {
        "lanes": [{"name": name, "heat": heat.tolist(), "peak": peak} for name, heat, peak in lanes if heat.any()],
        "marks": [
            {"at": (start.at - begin) / whole, "text": _mark(start), "is_rewind": start.from_step is not None}
            for start in history.starts[-MOST_MARKS:]
        ],
        "bin_seconds": whole / BINS,
        "after": [clock((i + 0.5) * whole / BINS) for i in range(BINS)],
        "ticks": [strftime("%Y-%m-%d %H:%M UTC", gmtime(begin)), *(clock(whole * i / 5) for i in range(1, 6))],
    }


def load(spans: Floats, edges: Floats) -> Floats:
    """[B] how many of the spans were open on average in each bin."""
    return np.diff(open_seconds(spans, edges)) / np.diff(edges)


def covered(spans: Iterable[Span], windows: Floats) -> Floats:
    """[W] seconds of each window [W, 2] in which at least one span was open; 0 for an empty window."""
    until = open_seconds(union(spans), windows)
    return (until[:, 1] - until[:, 0]).clip(0)


def open_seconds(spans: Floats, moments: Floats) -> Floats:
    """Seconds that spans [N, 2] were open before each moment, added up over the spans; of the shape of `moments`.

    They are a sum of max(t - begin, 0) - max(t - end, 0), which sorted begins and ends give for all moments at once.
    """
    if not spans.size or not moments.size:
        return np.zeros(moments.shape)
    base = moments.min()  # sums of seconds since 1970 would lose the digits that matter
    ends = np.maximum(spans[:, 1], spans[:, 0])
    return _ramp(spans[:, 0] - base, moments - base) - _ramp(ends - base, moments - base)


def union(spans: Iterable[Span]) -> Floats:
    """[N, 2] the same time without overlaps."""
    merged: list[Span] = []
    reached = -math.inf
    for begin, end in sorted(spans):
        if end > reached:
            merged.append((max(begin, reached), end))
            reached = end
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def _ramp(times: Floats, moments: Floats) -> Floats:
    """The sum over times of max(moment - time, 0)."""
    times = np.sort(times)
    index = np.searchsorted(times, moments)
    return index * moments - np.concatenate([[0.0], np.cumsum(times)])[index]


def _pieces(history: RunHistory) -> Iterator[tuple[float, float, str, int]]:
    """The wall time cut up: begin, end, kind, and the step that it follows or is (0 for none)."""
    made = {number: list(steps) for number, steps in itertools.groupby(history.steps, key=lambda step: step.start)}
    for start, following in itertools.zip_longest(history.starts, history.starts[1:]):
        reached, kind, last = start.at, "start-up", 0
        limit = max(following.at if following else start.end, start.at)  # the machine's clock may have been set back
        steps = made.get(start.number, [])
        for step in steps:
            began, ended = (min(max(moment, reached), limit) for moment in (step.at - step.seconds, step.at))
            yield reached, began, kind, last
            yield began, ended, "steps" if step.is_live else "lost", step.version
            reached, kind, last = ended, "other", step.version
        if following is None:
            yield reached, max(start.end, reached), kind, last
            return
        deaths = [at for at in history.trainer_deaths if following.is_in_place and reached <= at <= limit]
        cut = min(max(deaths or [start.end, reached]), limit)
        yield reached, cut, "lost" if steps else "start-up", last
        yield cut, limit, "start-up" if following.is_in_place else "down", last


def _phase(rows: Iterable[Mapping[str, float]], name: str, *, after: Sequence[str]) -> list[Span]:
    """When a part of each step was, counted back from the step's end over what comes after it."""
    ends = [(row[name], row["time"] - sum(row.get(later, 0.0) for later in after)) for row in rows if name in row]
    return [(end - seconds, end) for seconds, end in ends]


def _mark(start: Start) -> str:
    if start.is_in_place:
        return f"trainer back at step {start.from_step}"
    return "start" if start.from_step is None else f"start {start.number} from step {start.from_step}"
