"""The dated events of a run, from its ledger: starts, steps, pauses, evaluations, and what its processes reported."""

from __future__ import annotations

import itertools
import json
import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .page import plural

MOST_WORKERS = 16
"""Workers told apart; more of them are one."""
MOST_EVALUATIONS = 1000
"""Scores that are read, the newest ones."""
MOST_EVENTS = 40
"""Different events that are listed, the newest ones."""

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]
"""Begin and end, seconds since 1970."""


@dataclass(frozen=True, slots=True)
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
    """The last event of this start."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, of the surviving lineage or of a branch that a rewind left."""

    version: int
    start: int
    at: float
    """When the engines held its weights."""
    is_live: bool
    committed_at: float | None
    has_checkpoint: bool
    seconds: float
    """Of waiting for groups, training and weight update; 0 where that was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """The dated events of a run. Empty lists for a run that has not begun."""

    starts: Sequence[Start] = ()
    steps: Sequence[Step] = ()
    """In the order in which they were made."""
    evaluations: Sequence[Span] = ()
    """From the moment each was due to its end."""
    pauses: Sequence[Span] = ()
    """No engine served."""
    trainer_deaths: Sequence[float] = ()
    """When trainer ranks were found dead."""

    @property
    def begin(self) -> float:
        return self.starts[0].at if self.starts else math.nan

    @property
    def end(self) -> float:
        """The last event of the run so far."""
        return max((start.end for start in self.starts), default=math.nan)


def read_history(db: sqlite3.Connection) -> RunHistory:
    ends = _ends(db)
    starts = "SELECT start, at, from_step, is_in_place, returned FROM starts ORDER BY start"
    steps = db.execute(
        "SELECT facts, version, start, at, dropped_start IS NULL, committed_at, checkpoint IS NOT NULL FROM steps "
        "ORDER BY step"
    )
    return RunHistory(
        starts=[Start(*row, end=ends[row[0]]) for row in db.execute(starts)],
        steps=[Step(*row, seconds=max(json.loads(facts).get("seconds", 0.0), 0.0)) for facts, *row in steps],
        evaluations=[(at - max(s, 0.0), at) for at, s in db.execute("SELECT at, seconds FROM evaluations ORDER BY at")],
        pauses=_pauses(db, ends),
        trainer_deaths=[at for (at,) in db.execute("SELECT at FROM happenings WHERE kind = 'trainer' ORDER BY at")],
    )


def read_group_spans(db: sqlite3.Connection, history: RunHistory) -> dict[str, Floats]:
    """Worker -> [N, 2] from issue to end of each group that it finished."""
    ends = {start.number: start.end for start in history.starts}
    spans: dict[str, list[Span]] = {}
    # What a start issues again waits for its engines; when it really ran, its episodes know.
    for file, began, finished_at, start in db.execute(
        "SELECT file, coalesce(again.at, issued_at), finished_at, issued_start FROM groups "
        "JOIN segments USING (segment) LEFT JOIN (SELECT number, min(finished_at - seconds) AS at FROM episodes "
        "WHERE number IN (SELECT number FROM changes WHERE what = 'reissued') GROUP BY number) AS again "
        "USING (number) WHERE finished_at IS NOT NULL"
    ):
        # A group that a later start found on the disk had ended before its own start did.
        span = (began, min(finished_at, ends.get(start, finished_at)))
        spans.setdefault(file.rsplit(".", 2)[0], []).append(span)  # worker-0.003.spool
    names = sorted(spans, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])
    if len(names) > MOST_WORKERS:
        names, rest = names[: MOST_WORKERS - 1], names[MOST_WORKERS - 1 :]
        names.append(f"{len(rest)} more workers")
        spans[names[-1]] = [span for name in rest for span in spans[name]]
    return {name: np.array(spans[name], dtype=np.float64) for name in names}


def read_evaluations(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """The newest scores in the order in which they came.

    `dataset` (`*` where all were skipped), `step`, `lag` in steps, `score` or None and the `reason`, its 95 %
    `interval` or None, `seconds`, and `is_live`: whether the run still stands on these weights.
    """
    rows = db.execute(
        "SELECT dataset, version, max(logged_version - version, 0), score, reason, seconds, NOT EXISTS (SELECT 1 FROM "
        "starts WHERE starts.start > evaluations.start AND from_step < version), metrics FROM evaluations "
        f"ORDER BY evaluation DESC LIMIT {MOST_EVALUATIONS}"
    )
    names = ("dataset", "step", "lag", "score", "reason", "seconds", "is_live")
    newest = [
        dict(zip(names, known, strict=True), interval=_interval(known[0], json.loads(metrics)))
        for *known, metrics in rows
    ]
    return newest[::-1]


def read_events(db: sqlite3.Connection, history: RunHistory) -> dict[str, Any]:
    """What processes and the loop reported, once or several times in the same words.

    `kinds` with how often each was reported; `newest`: kind, subject, text, times and the moment of the last; and how
    many `different` ones there are, listed or not.
    """
    grouped = "FROM happenings GROUP BY kind, subject, text"
    newest = db.execute(
        f"SELECT kind, subject, text, count(*), max(at) {grouped} ORDER BY max(happening) DESC LIMIT {MOST_EVENTS}"
    )
    (different,) = db.execute(f"SELECT count(*) FROM (SELECT 1 {grouped})").fetchone()
    kinds = db.execute("SELECT kind, count(*) FROM happenings GROUP BY kind ORDER BY 2 DESC, 1 LIMIT 20")
    starts = [("start", f"{one.number}", _start_text(one), 1, one.at) for one in history.starts[-MOST_EVENTS:]]
    return {
        "kinds": [*([("start", len(history.starts))] if starts else []), *kinds],
        "newest": sorted([*newest, *starts], key=lambda event: -event[-1])[:MOST_EVENTS],
        "different": different + len(history.starts),
    }


def _ends(db: sqlite3.Connection) -> dict[int, float]:
    """Start -> its last event. `finished_at` is no sign: what a start finds on the disk had ended before."""
    tables = " UNION ALL ".join(
        f"SELECT start, max(at) AS at FROM {table} GROUP BY start"
        for table in ("starts", "changes", "steps", "happenings", "evaluations")
    )
    newest = "SELECT start, committed_at FROM steps WHERE start = (SELECT max(start) FROM starts)"
    return dict(db.execute(f"SELECT start, max(at) FROM ({tables} UNION ALL {newest}) GROUP BY start"))


def _pauses(db: sqlite3.Connection, ends: Mapping[int, float]) -> list[Span]:
    """Each from its first event to the event `over`, or to the end of the start that paused."""
    pauses: list[Span] = []
    events = db.execute(
        "SELECT start, text, at FROM happenings WHERE kind = 'run' AND subject = 'pause' ORDER BY happening"
    )
    for start, of_start in itertools.groupby(events, key=lambda event: event[0]):
        begin: float | None = None
        for _, text, at in [*of_start, (start, "over", ends[start])]:
            if text != "over":
                begin = at if begin is None else begin
            elif begin is not None:
                pauses.append((begin, max(begin, at)))
                begin = None
    return pauses


def _interval(dataset: str, metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    name = "eval" if dataset in ("eval", "external") else f"eval/{dataset}"
    low, high = metrics.get(f"{name}/score_low"), metrics.get(f"{name}/score_high")
    return (low, high) if isinstance(low, int | float) and isinstance(high, int | float) else None


def _start_text(start: Start) -> str:
    if start.from_step is None:
        return "a new run begins"
    text = f"{'the trainer is back at' if start.is_in_place else 'goes on from'} step {start.from_step}"
    return f"{text}; {plural(start.returned, 'group')} returned to the buffer" if start.returned else text
