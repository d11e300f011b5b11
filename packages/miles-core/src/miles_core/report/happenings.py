"""What happened to the parts of a run: starts, engines, workers, trainer ranks, alarms."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .course import Course, Start
from .markup import card, count, plural, section, table

LATEST = 40
"""Different happenings that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened to a subject, once or several times in the same words."""

    kind: str
    subject: str
    text: str
    times: int
    first: float
    last: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happenings:
    kinds: Sequence[tuple[str, int]]
    """How often each kind of thing happened, the most frequent first."""
    latest: Sequence[Happening]
    """Newest first."""
    different: int
    """How many there are, shown or not."""


def read_happenings(db: sqlite3.Connection, course: Course) -> Happenings:
    grouped = "FROM happenings GROUP BY kind, subject, text"
    latest = [
        Happening(kind=kind, subject=subject, text=text, times=times, first=first, last=last)
        for kind, subject, text, times, first, last in db.execute(
            f"SELECT kind, subject, text, count(*), min(at), max(at) {grouped} ORDER BY max(happening) DESC "
            f"LIMIT {LATEST}"
        )
    ]
    (different,) = db.execute(f"SELECT count(*) FROM (SELECT 1 {grouped})").fetchone()
    kinds = list(db.execute("SELECT kind, count(*) FROM happenings GROUP BY kind ORDER BY 2 DESC, 1 LIMIT 20"))
    starts = [_of_start(start) for start in course.starts[-LATEST:]]
    return Happenings(
        kinds=[("start", len(course.starts)), *kinds] if course.starts else kinds,
        latest=sorted([*latest, *starts], key=lambda h: -h.last)[:LATEST],
        different=different + len(course.starts),
    )


def happenings_section(found: Happenings, *, begin: float) -> str:
    """
    Args:
        begin: of the run, seconds since 1970.
    """
    if not found.latest:
        return ""
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(h.last)),
            clock(h.last - begin),
            h.kind,
            h.subject,
            h.text,
            count(h.times) if h.times > 1 else "",
        ]
        for h in found.latest
    ]
    note = "How often: " + ", ".join(f"{kind} {count(times)}" for kind, times in found.kinds) + "."
    if found.different > len(rows):
        note += f" The newest {len(rows)} of {found.different} different happenings:"
    columns = ["UTC", "after", "part", "which", "what", "times"]
    return section("What happened", note, card(table(columns, rows, numbers=(1, 5))))


def clock(seconds: float) -> str:
    """`0:04:12`, `2 d 3:04:12`."""
    whole = max(round(seconds), 0)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def _of_start(start: Start) -> Happening:
    if start.from_step is None:
        text = "a new run begins"
    else:
        text = f"goes on from step {start.from_step}"
        if start.is_in_place:
            text = f"the trainer is back at step {start.from_step}"
        text += f"; {plural(start.returned, 'group')} returned to the buffer" if start.returned else ""
    return Happening(kind="start", subject=f"{start.number}", text=text, times=1, first=start.at, last=start.at)
