"""The course of a run in time, from its ledger: starts, steps, evaluations, pauses."""

from __future__ import annotations

import json
import math
import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A process that began or went on, or a trainer that went back inside of one."""

    number: int
    at: float
    from_step: int | None
    """The committed step it went on from; None for a fresh run."""
    is_in_place: bool
    returned: int
    """Groups that went back to the buffer."""
    end: float
    """When the last thing happened that this start did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step, of the surviving lineage or of a branch that a rewind left."""

    version: int
    start: int
    at: float
    """When the engines held its weights."""
    seconds: float
    """Of waiting for groups, training and weight update; 0 where that was not recorded."""
    is_live: bool
    committed_at: float | None
    has_checkpoint: bool

    @property
    def began(self) -> float:
        return self.at - self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happened when. Empty lists for a run that has not begun."""

    starts: Sequence[Start]
    steps: Sequence[Step]
    """In the order in which they were made."""
    evaluations: Sequence[tuple[float, float]]
    """From the moment each was due to its end."""
    pauses: Sequence[tuple[float, float]]
    """No engine served."""
    losses: Sequence[float]
    """When trainer ranks were found dead."""

    @property
    def begin(self) -> float:
        return self.starts[0].at if self.starts else math.nan

    @property
    def end(self) -> float:
        """The last event of the run so far."""
        return max((start.end for start in self.starts), default=math.nan)


class Cover:
    """The union of some intervals, and how much of a window it covers."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        for begin, end in sorted(intervals):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif end > begin:
                self._begins.append(begin)
                self._ends.append(end)
        self._sums = [0.0]
        for begin, end in zip(self._begins, self._ends, strict=True):
            self._sums.append(self._sums[-1] + end - begin)

    def seconds(self, begin: float, end: float) -> float:
        """Of the window from `begin` to `end`; 0 for an empty one."""
        return max(self._until(end) - self._until(begin), 0.0)

    def _until(self, moment: float) -> float:
        index = bisect_right(self._begins, moment)
        return self._sums[index] - max(self._ends[index - 1] - moment, 0.0) if index else 0.0


def read_course(db: sqlite3.Connection) -> Course:
    ends = _ends(db)
    starts = [
        Start(
            number=number,
            at=at,
            from_step=from_step,
            is_in_place=bool(in_place),
            returned=returned,
            end=max(ends.get(number, at), at),
        )
        for number, at, from_step, in_place, returned in db.execute(
            "SELECT start, at, from_step, is_in_place, returned FROM starts ORDER BY start"
        )
    ]
    steps = [
        Step(
            version=version,
            start=start,
            at=at,
            seconds=_seconds(json.loads(facts)),
            is_live=dropped is None,
            committed_at=committed_at,
            has_checkpoint=checkpoint is not None,
        )
        for version, start, at, facts, dropped, committed_at, checkpoint in db.execute(
            "SELECT version, start, at, facts, dropped_start, committed_at, checkpoint FROM steps ORDER BY step"
        )
    ]
    return Course(
        starts=starts,
        steps=steps,
        evaluations=[(at - max(s, 0.0), at) for at, s in db.execute("SELECT at, seconds FROM evaluations ORDER BY at")],
        pauses=_pauses(db, ends),
        losses=[at for (at,) in db.execute("SELECT at FROM happenings WHERE kind = 'trainer' ORDER BY at")],
    )


def _ends(db: sqlite3.Connection) -> dict[int, float]:
    """Start -> its last event. `finished_at` is no sign: what a start finds on the disk had ended before."""
    ends: dict[int, float] = {}
    for table in ("changes", "steps", "happenings", "evaluations"):
        for start, at in db.execute(f"SELECT start, max(at) FROM {table} GROUP BY start"):
            ends[start] = max(ends.get(start, at), at)
    last = max(ends, default=None)
    if last is not None:
        (committed_at,) = db.execute("SELECT max(committed_at) FROM steps WHERE start = ?", (last,)).fetchone()
        ends[last] = max(ends[last], committed_at or ends[last])
    return ends


def _pauses(db: sqlite3.Connection, ends: Mapping[int, float]) -> list[tuple[float, float]]:
    """Each from the first word of it to the word `over`, or to the end of the start that paused."""
    pauses: list[tuple[float, float]] = []
    since: tuple[float, int] | None = None
    for text, at, start in db.execute(
        "SELECT text, at, start FROM happenings WHERE kind = 'run' AND subject = 'pause' ORDER BY happening"
    ):
        if since is not None and since[1] != start:
            pauses.append((since[0], max(ends.get(since[1], since[0]), since[0])))
            since = None
        if text != "over":
            since = since or (at, start)
        elif since is not None:
            pauses.append((since[0], at))
            since = None
    if since is not None:
        pauses.append((since[0], max(ends.get(since[1], since[0]), since[0])))
    return pauses


def _seconds(facts: object) -> float:
    value = facts.get("seconds") if isinstance(facts, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else 0.0
