"""Effective training time ratio: how much of the wall time became steps that count, and what became of the rest.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .course import Course, Cover, Start, Step

KINDS: Final = {
    "steps": ("steps that count", 1),
    "lost": ("steps lost to rewinds or cut off", 4),
    "start-up": ("start-up and recovery", 3),
    "evaluation": ("evaluation, training waiting", 2),
    "checkpoint": ("checkpoints, training waiting", 5),
    "paused": ("no engine served", 6),
    "down": ("no process ran", 7),
    "other": ("between steps, and the end", 8),
}
"""Kind -> what it is called, and its colour."""
WITHIN: Final = ("time/take_wait", "time/train", "time/sync")
"""What a step spends its time on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """The wall time of a run by kind."""

    seconds: Mapping[str, float]
    """Of each kind in `KINDS`; they add up to the wall time."""
    within: Mapping[str, float]
    """What the surviving steps did: waited for groups, trained, updated weights; from `metrics.jsonl`."""

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float | None:
        """The effective training time ratio; None before anything happened."""
        return self.seconds["steps"] / self.wall if self.wall > 0 else None


def split_time(course: Course, rows: Sequence[Mapping[str, float]]) -> TimeSplit:
    """Sort every second of a run.

    Args:
        rows: of `metrics.jsonl`, for what a checkpoint cost and what a step did.
    """
    by_step = {round(row["step"]): row for row in rows}
    evaluated, paused = Cover(course.evaluations), Cover(course.pauses)
    seconds = dict.fromkeys(KINDS, 0.0)
    for begin, end, kind, step in _pieces(course):
        whole = end - begin
        found: dict[str, float] = {}
        if kind == "steps":
            found["paused"] = paused.seconds(begin, end)
        elif kind in ("start-up", "other"):
            found["evaluation"] = evaluated.seconds(begin, end)
        if kind == "other":
            row = by_step.get(step, {})
            saved = row.get("time/checkpoint", 0.0) + row.get("time/checkpoint_wait", 0.0)
            found["checkpoint"] = min(saved, whole - found["evaluation"])
        found[kind] = whole - sum(found.values())
        for name, part in found.items():
            seconds[name] += part
    steps = [row for row in rows if "time/step" in row]
    return TimeSplit(
        seconds={kind: max(seconds[kind], 0.0) for kind in KINDS},
        within={name: sum(row.get(name, 0.0) for row in steps) for name in WITHIN},
    )


def _pieces(course: Course) -> Iterator[tuple[float, float, str, int]]:
    """The wall time cut up: begin, end, kind, and the step that it follows or is (0 for none)."""
    steps = {number: list(made) for number, made in itertools.groupby(course.steps, key=lambda step: step.start)}
    for start, following in itertools.zip_longest(course.starts, course.starts[1:]):
        yield from _of_start(start, following, steps.get(start.number, []), course.losses)


def _of_start(
    start: Start, following: Start | None, steps: Sequence[Step], losses: Sequence[float]
) -> Iterator[tuple[float, float, str, int]]:
    reached, kind, last = start.at, "start-up", 0
    limit = max(following.at if following else start.end, start.at)  # the machine's clock may have been set back
    for step in steps:
        began, ended = (min(max(moment, reached), limit) for moment in (step.began, step.at))
        yield reached, began, kind, last
        yield began, ended, "steps" if step.is_live else "lost", step.version
        reached, kind, last = ended, "other", step.version
    if following is None:
        yield reached, max(start.end, reached), kind, last
        return
    died = max((at for at in losses if reached <= at <= limit), default=None) if following.is_in_place else None
    cut = min(max(start.end if died is None else died, reached), limit)
    yield reached, cut, "lost" if steps else "start-up", last
    yield cut, limit, "start-up" if following.is_in_place else "down", last
