"""Everything that a report takes from the ledger, read in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_tito.errors import MilesError
from miles_tito.records import Group

from miles_core.durable.spool import read_group
from miles_core.ledger import LEDGER, reading, trained_over_the_run

from .course import Course, read_course
from .discards import Discarded, read_discards
from .evaluations import Point, read_evaluations
from .fates import Fates, read_fates
from .happenings import Happenings, read_happenings
from .timeline import Spans, read_groups

MOMENTS = 4
"""Points of the run that conversations are shown from, first and last included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """What the ledger knows of a run."""

    course: Course
    fates: Fates
    discards: Sequence[Discarded]
    evaluations: Sequence[Point]
    happenings: Happenings
    groups: Mapping[str, Spans]
    """Worker -> when its groups ran."""
    trained: Sequence[tuple[Group, str]]
    """A few groups spread over the run, with their fates."""


def read_book(run: Path, notes: list[str]) -> Book | None:
    """None where there is no ledger, or none that can be read; then `notes` says why."""
    if not (run / LEDGER).exists():
        return None
    trajectories = run / "trajectories"
    try:
        with reading(run / LEDGER) as db:
            db.execute("BEGIN")  # all of it tells of one moment, whatever the run writes meanwhile
            course, fates = read_course(db), read_fates(db)
            return Book(
                course=course,
                fates=fates,
                discards=read_discards(db, fates, trajectories),
                evaluations=read_evaluations(db),
                happenings=read_happenings(db, course),
                groups=read_groups(db, course),
                trained=_trained(trajectories, trained_over_the_run(db, MOMENTS), notes),
            )
    except (MilesError, OSError, ValueError) as error:
        notes.append(f"The ledger could not be read: {error}")
        return None


def _trained(trajectories: Path, places: Sequence[tuple], notes: list[str]) -> list[tuple[Group, str]]:
    try:
        return [(read_group(trajectories, place), f"trained at step {version}") for version, place in places]
    except (MilesError, OSError) as error:
        notes.append(f"Conversations could not be read: {error}")
        return []
