"""What the writer and readers ask of the tables, and the records of the answers; statements alone, no state.

A version is an optimizer step. After a rewind to step `c` the labels above `c` are given again, to other weights:

            c ─ c+1' ─ c+2' ─ …  ─ j'        the branch that survives
            │
            └── c+1 ── c+2 ── … ─ c+k        the dead branch: its labels were given out before

A token that version `c+k` of the dead branch sampled is `k` steps from `c`, and version `j` of the new branch is
`j - c` steps from it: its distance is `k + (j - c)`, as if it came from version `c - k`. So the versions of what is
kept are mirrored at `c`; after several rewinds at the lowest, where the branches part.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from miles_rollout.fates import Fate, FateCounts

from miles_core.durable.spool import SpoolAddress

OPEN = "fate IN ('in_flight', 'buffered')"
"""As the partial index over open groups spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that a start runs under; `verify` checks its groups against them."""

    max_staleness: int | None = None
    """Versions that a trained token may be behind; None where a policy keeps older ones."""
    credits: int | None = None
    """Groups that may be open when another one is issued; None for no bound."""
    retries: int = 0
    """Further attempts that a worker makes of an episode by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """A group without a final fate, as a resumed run needs it."""

    id: str
    prompt_id: str
    attempt: int
    """Number of the first attempt of its present issue, above all that were made before."""
    address: SpoolAddress | None
    """Where its record lies; None while it runs."""
    is_admitted: bool
    """The buffer holds it: filter and policies at `put` are behind it."""
    issued_version: int
    """Version of the engines at its issue, as the surviving branch counts."""
    rewinds: tuple[int, ...]
    """Steps that the run went back to since it was issued."""

    def versions(self, oldest: int | None, newest: int | None) -> tuple[int, int] | None:
        """What recorded versions of some of its tokens are on the surviving branch; None where none were recorded."""
        if oldest is None or newest is None:
            return None
        return effective_versions(oldest, newest, self.rewinds)


class PendingRetry(NamedTuple):
    """A prompt that is to run again, and was not issued again yet."""

    retry_of: str
    """Id of the discarded group."""
    prompt_id: str


def effective_version(version: int, rewinds: Collection[int]) -> int:
    """The version of one token as the surviving branch counts.

    Args:
        version: its label.
        rewinds: the steps that the run went back to since the token was sampled.
    """
    return min((version, *(2 * step - version for step in rewinds)))


def effective_versions(oldest: int, newest: int, rewinds: Collection[int]) -> tuple[int, int]:
    """The oldest and newest version of some tokens as the surviving branch counts."""
    if not rewinds:
        return oldest, newest
    lowest = min(rewinds)
    ends = effective_version(oldest, rewinds), effective_version(newest, rewinds)
    return min(ends), (lowest if oldest <= lowest <= newest else max(ends))


def open_numbers(db: sqlite3.Connection) -> dict[str, int]:
    """Open groups: id -> number."""
    return dict(db.execute(f"SELECT group_id, number FROM groups WHERE {OPEN}"))


def segments(db: sqlite3.Connection) -> dict[str, int | None]:
    """Spool files: name -> row."""
    return dict(db.execute("SELECT file, segment FROM segments"))


def open_groups(db: sqlite3.Connection) -> list[OpenGroup]:
    """In the order of issue."""
    steps, found = rewinds(db), list[OpenGroup]()
    for name, prompt_id, attempt, file, offset, fate, issued_start, issued_version in db.execute(
        "SELECT group_id, prompt_id, attempt, file, offset, fate, issued_start, issued_version FROM groups "
        f"LEFT JOIN segments USING (segment) WHERE {OPEN} ORDER BY number"
    ):
        later = tuple(step for start, step in steps if start > issued_start)
        group = OpenGroup(
            id=name,
            prompt_id=prompt_id,
            attempt=attempt,
            address=None if file is None else SpoolAddress(file=file, offset=offset),
            is_admitted=fate == Fate.BUFFERED,
            issued_version=effective_version(issued_version, later),
            rewinds=later,
        )
        found.append(group)
    return found


def rewinds(db: sqlite3.Connection) -> list[tuple[int, int]]:
    """Every start that went back: its number, and to which step."""
    return list(db.execute("SELECT start, from_step FROM starts WHERE from_step IS NOT NULL ORDER BY start"))


def counts(db: sqlite3.Connection) -> FateCounts:
    by_fate = dict(db.execute("SELECT fate, count(*) FROM groups GROUP BY fate"))
    return FateCounts(
        issued=sum(by_fate.values()),
        **{str(fate): by_fate.get(fate, 0) for fate in Fate if fate.is_final},
        in_flight=by_fate.get(Fate.IN_FLIGHT, 0) + by_fate.get(Fate.BUFFERED, 0),
        twice=0,
    )


def last_group(db: sqlite3.Connection) -> tuple[int, str]:
    """Number and id of the newest group; (-1, "") before the first."""
    return db.execute("SELECT number, group_id FROM groups ORDER BY number DESC LIMIT 1").fetchone() or (-1, "")


def group_id(db: sqlite3.Connection, number: int) -> str:
    return db.execute("SELECT group_id FROM groups WHERE number = ?", (number,)).fetchone()[0]


def drawn(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT drawn FROM groups WHERE drawn IS NOT NULL ORDER BY number DESC LIMIT 1").fetchone()
    return row[0] if row else 0


def pending_retries(db: sqlite3.Connection) -> list[PendingRetry]:
    rows = db.execute("SELECT prompt_id, group_id FROM groups WHERE is_retry_due ORDER BY number")
    return [PendingRetry(prompt_id=prompt_id, retry_of=group) for prompt_id, group in rows]


def unfinished(db: sqlite3.Connection) -> dict[str, tuple[int, int, float]]:
    """Open groups whose result no start has recorded: id -> number, first attempt, when it was last issued."""
    rows = db.execute(
        "SELECT group_id, number, attempt, (SELECT max(at) FROM changes WHERE changes.number = groups.number "
        f"AND what IN ('issued', 'reissued')) FROM groups WHERE {OPEN} AND finished_at IS NULL ORDER BY number"
    )
    return {name: (number, attempt, at) for name, number, attempt, at in rows}


def scores(db: sqlite3.Connection) -> dict[int, float | None]:
    """Mean score over the datasets of each evaluated version that the run still stands on; None where one is missing.

    Of several evaluations of one version the last counts, and weights that a start went back behind count no more.
    """
    went_back = rewinds(db)
    found: dict[int, dict[str, float | None]] = {}
    for version, dataset, score, start in db.execute(
        "SELECT version, dataset, score, start FROM evaluations ORDER BY evaluation"
    ):
        if all(later <= start or step >= version for later, step in went_back):
            found.setdefault(version, {})[dataset] = score
    means: dict[int, float | None] = {}
    for version, by_dataset in sorted(found.items()):
        named = [score for name, score in by_dataset.items() if name != "*"]  # `*` was skipped as a whole
        has_all = bool(named) and None not in named
        means[version] = sum(score for score in named if score is not None) / len(named) if has_all else None
    return means


def last_start(db: sqlite3.Connection) -> tuple[int, int | None, int, Limits] | None:
    """Number, step that it went on from, groups that it returned, and its limits; None before the first."""
    row = db.execute(
        "SELECT start, from_step, returned, max_staleness, credits, retries FROM starts ORDER BY start DESC LIMIT 1"
    ).fetchone()
    return (*row[:3], Limits(max_staleness=row[3], credits=row[4], retries=row[5])) if row else None


def last_version(db: sqlite3.Connection) -> int:
    """Of the newest step in the surviving lineage; 0 before the first."""
    return db.execute("SELECT max(version) FROM steps WHERE dropped_start IS NULL").fetchone()[0] or 0


def last_commit(db: sqlite3.Connection) -> int:
    """The newest committed step of the surviving lineage; 0 before the first."""
    newest = "SELECT max(version) FROM steps WHERE dropped_start IS NULL AND committed_at IS NOT NULL"
    return db.execute(newest).fetchone()[0] or 0


def groups_of_steps_after(db: sqlite3.Connection, version: int) -> list[tuple[int, str]]:
    """Number and id of what the live steps after `version` trained."""
    return list(
        db.execute(
            "SELECT number, group_id FROM steps JOIN step_groups USING (step) JOIN groups USING (number) "
            "WHERE dropped_start IS NULL AND version > ? AND fate = 'trained' ORDER BY number",
            (version,),
        )
    )


def trained_over_the_run(db: sqlite3.Connection, count: int) -> list[tuple[int, SpoolAddress]]:
    """One spooled group of each of `count` steps at even distances, first and last included: version and place."""
    newest = last_version(db)
    versions = {1 + round(i * (newest - 1) / max(count - 1, 1)) for i in range(count)} if newest else set[int]()
    found = (
        db.execute(
            "SELECT version, file, offset FROM steps JOIN step_groups USING (step) JOIN groups USING (number) "
            "JOIN segments USING (segment) WHERE dropped_start IS NULL AND version = ? ORDER BY number LIMIT 1",
            (version,),
        ).fetchone()
        for version in sorted(versions)
    )
    return [(row[0], SpoolAddress(file=row[1], offset=row[2])) for row in found if row]
