"""Who worked when: lanes of a run cut into bins of equal time, so that a week fits on the page."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .course import Course

BINS = 240
MOST_WORKERS = 16
"""Lanes of workers; more of them share the last lane."""

Spans = npt.NDArray[np.float64]
"""[N, 2] begins and ends, seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of the timeline."""

    name: str
    heat: npt.NDArray[np.float64]
    """[B] 0 to 1."""
    labels: Sequence[str]
    """[B] what the pointer shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    at: float
    text: str
    is_rewind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    begin: float
    end: float
    lanes: Sequence[Lane]
    marks: Sequence[Mark]


def read_groups(db: sqlite3.Connection, course: Course) -> dict[str, Spans]:
    """Worker -> from issue to end of each group that it finished."""
    ends = {start.number: start.end for start in course.starts}
    # What a start issues again waits for its engines; when it really ran, its episodes know.
    again: dict[int, float | None] = dict(
        db.execute(
            "SELECT number, min(finished_at - seconds) FROM episodes "
            "WHERE number IN (SELECT number FROM changes WHERE what = 'reissued') GROUP BY number"
        )
    )
    files: dict[int, str] = dict(db.execute("SELECT segment, file FROM segments"))
    spans: dict[int, list[tuple[float, float]]] = {}
    for number, segment, issued_at, finished_at, start in db.execute(
        "SELECT number, segment, issued_at, finished_at, issued_start FROM groups WHERE segment IS NOT NULL "
        "AND finished_at IS NOT NULL"
    ):
        # A group that a later start found on the disk had ended before its own start did.
        ended = min(finished_at, ends.get(start, finished_at))
        spans.setdefault(segment, []).append((again.get(number) or issued_at, ended))
    workers: dict[str, list[tuple[float, float]]] = {}
    for segment, found in spans.items():
        workers.setdefault(_worker(files.get(segment, "")), []).extend(found)
    names = sorted(workers, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])
    if len(names) > MOST_WORKERS:
        shared = f"{len(names) - MOST_WORKERS + 1} more workers"
        workers[shared] = [span for name in names[MOST_WORKERS - 1 :] for span in workers[name]]
        names = [*names[: MOST_WORKERS - 1], shared]
    return {name: np.array(workers[name], dtype=np.float64) for name in names}


def make_timeline(
    course: Course | None, groups: Mapping[str, Spans], rows: Sequence[Mapping[str, float]]
) -> Timeline | None:
    """
    Args:
        course: None where there is no ledger; the lanes of trainer and weight update then come from `rows` alone.
        rows: of `metrics.jsonl`, and those that rewinds left behind, by time.
    """
    done = [row for row in rows if {"time", "time/step"} <= row.keys()]
    begins, ends = [row["time"] - row["time/step"] for row in done], [row["time"] for row in done]
    if course and course.starts:
        begins, ends = [course.begin], [*ends, course.end]
    begin, end = min(begins, default=np.nan), max(ends, default=np.nan)
    if not end > begin:
        return None
    edges = np.linspace(begin, end, BINS + 1)
    lanes = [_workers(name, spans, edges, _peak(groups, edges)) for name, spans in groups.items()]
    lanes.append(_engines(done, edges))
    lanes.append(_shares("trainer", _phase(done, "time/train", after=("time/sync", "time/on_step")), edges))
    lanes.append(_shares("weight update", _phase(done, "time/sync", after=("time/on_step",)), edges))
    marks: list[Mark] = []
    if course:
        lanes.append(_shares("evaluation", course.evaluations, edges))
        saved = [(s.at, s.committed_at) for s in course.steps if s.has_checkpoint and s.committed_at is not None]
        lanes.append(_shares("checkpoints", saved, edges))
        lanes.append(_shares("no engine served", course.pauses, edges))
        marks = [_mark(s.number, s.at, s.from_step, s.is_in_place) for s in course.starts]
    return Timeline(begin=begin, end=end, lanes=[lane for lane in lanes if lane.heat.any()], marks=marks)


def load(spans: Spans, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[B] how many of the spans were open on average in each bin.

    Seconds up to a moment t that spans were open are a sum of max(t - begin, 0) - max(t - end, 0), which sorted begins
    and ends give for every edge at once.
    """
    if not len(spans):
        return np.zeros(len(edges) - 1)
    ended = np.maximum(spans[:, 1], spans[:, 0])
    until = _ramp(np.sort(spans[:, 0]), edges) - _ramp(np.sort(ended), edges)
    return np.diff(until) / np.diff(edges)


def _ramp(moments: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[B + 1] the sum over moments of max(edge - moment, 0)."""
    base = edges[0]  # sums of seconds since 1970 would lose the digits that matter
    index = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments - base)])
    return index * (edges - base) - sums[index]


def _peak(groups: Mapping[str, Spans], edges: npt.NDArray[np.float64]) -> float:
    return max((float(load(spans, edges).max()) for spans in groups.values()), default=0.0)


def _workers(name: str, spans: Spans, edges: npt.NDArray[np.float64], peak: float) -> Lane:
    running = load(spans, edges)
    labels = [f"{value:.1f} groups" if value else "idle" for value in running.round(1).tolist()]
    return Lane(name=name, heat=running / peak if peak else running, labels=labels)


def _shares(name: str, spans: Iterable[tuple[float, float]], edges: npt.NDArray[np.float64]) -> Lane:
    busy = load(np.array(list(_union(spans)), dtype=np.float64).reshape(-1, 2), edges).clip(0, 1)
    return Lane(name=name, heat=busy, labels=[f"{value:.0%}" for value in busy.tolist()])


def _engines(rows: Sequence[Mapping[str, float]], edges: npt.NDArray[np.float64]) -> Lane:
    """Utilisation is logged as one number a step."""
    known = [row for row in rows if row.get("engine/utilisation", 0.0) > 0]
    spans = [(row["time"] - row["time/step"] * min(row["engine/utilisation"], 1.0), row["time"]) for row in known]
    return _shares("engines", spans, edges)


def _phase(rows: Sequence[Mapping[str, float]], name: str, *, after: Sequence[str]) -> list[tuple[float, float]]:
    """When a part of each step was, counted back from the step's end over what comes after it."""
    spans: list[tuple[float, float]] = []
    for row in rows:
        if name in row:
            end = row["time"] - sum(row.get(later, 0.0) for later in after)
            spans.append((end - row[name], end))
    return spans


def _union(spans: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """The same time without overlaps."""
    reached = -np.inf
    for begin, end in sorted(spans):
        if end > reached:
            yield max(begin, reached), end
            reached = end


def _worker(file: str) -> str:
    """`worker-0.003.spool` -> `worker-0`."""
    return re.sub(r"\.\d+\.spool$", "", file)


def _mark(number: int, at: float, from_step: int | None, in_place: bool) -> Mark:
    text = "start" if from_step is None else f"start {number} from step {from_step}"
    if in_place:
        text = f"trainer back at step {from_step}"
    return Mark(at=at, text=text, is_rewind=from_step is not None)
