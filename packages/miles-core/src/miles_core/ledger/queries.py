"""What is asked of the tables by the writer and by readers; statements alone, no state."""

from __future__ import annotations

import sqlite3

from miles_rollout.fates import Fate, FateCounts

from miles_core.durable.spool import SpoolAddress

from .records import Limits, OpenGroup, PendingRetry
from .versions import effective_version, effective_versions

OPEN = "fate IN ('in_flight', 'buffered')"
"""As the partial index over open groups spells it."""


def open_numbers(db: sqlite3.Connection) -> dict[str, int]:
    """Open groups: id -> number."""
    return dict(db.execute(f"SELECT group_id, number FROM groups WHERE {OPEN}"))


def open_groups(db: sqlite3.Connection) -> list[OpenGroup]:
    steps = rewinds(db)
    rows = db.execute(
        "SELECT group_id, number, prompt_id, attempt, retry_of, file, offset, fate, issued_start, issued_version, "
        f"oldest_version, newest_version FROM groups LEFT JOIN segments USING (segment) WHERE {OPEN} ORDER BY number"
    )
    return [_open_group(row, steps) for row in rows]


def _open_group(row: tuple, steps: list[tuple[int, int]]) -> OpenGroup:
    name, number, prompt_id, attempt, retry_of, file, offset, fate, issued_start, issued_version, oldest, newest = row
    later = tuple(step for start, step in steps if start > issued_start)
    oldest, newest = (None, None) if oldest is None else effective_versions(oldest, newest, later)
    return OpenGroup(
        id=name,
        number=number,
        prompt_id=prompt_id,
        attempt=attempt,
        retry_of=retry_of,
        address=None if file is None else SpoolAddress(file=file, offset=offset),
        is_admitted=fate == Fate.BUFFERED,
        rewinds=later,
        issued_version=effective_version(issued_version, later),
        oldest_version=oldest,
        newest_version=newest,
    )


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


def drawn(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT drawn FROM groups WHERE drawn IS NOT NULL ORDER BY number DESC LIMIT 1").fetchone()
    return row[0] if row else 0


def pending_retries(db: sqlite3.Connection) -> list[PendingRetry]:
    rows = db.execute("SELECT prompt_id, group_id FROM groups WHERE is_retry_due ORDER BY number")
    return [PendingRetry(prompt_id=prompt_id, retry_of=group) for prompt_id, group in rows]


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


def fate(db: sqlite3.Connection, name: str) -> str | None:
    row = db.execute("SELECT fate FROM groups WHERE group_id = ?", (name,)).fetchone()
    return row[0] if row else None


def group_id(db: sqlite3.Connection, number: int) -> str:
    return db.execute("SELECT group_id FROM groups WHERE number = ?", (number,)).fetchone()[0]


def unfinished(db: sqlite3.Connection) -> list[int]:
    """Open groups whose result no start has recorded."""
    return [n for (n,) in db.execute(f"SELECT number FROM groups WHERE {OPEN} AND finished_at IS NULL ORDER BY number")]


def awaited(db: sqlite3.Connection) -> dict[str, float]:
    """Open groups without a result: id -> when they were last issued."""
    return dict(
        db.execute(
            "SELECT group_id, (SELECT max(at) FROM changes WHERE changes.number = groups.number "
            f"AND what IN ('issued', 'reissued')) FROM groups WHERE {OPEN} AND finished_at IS NULL"
        )
    )


def awaits_record(db: sqlite3.Connection, number: int, *, attempt: int) -> bool:
    """Whether a record of `attempt` is the result that open group `number` waits for."""
    finished_at, first = db.execute("SELECT finished_at, attempt FROM groups WHERE number = ?", (number,)).fetchone()
    return finished_at is None and attempt >= first


def last_start(db: sqlite3.Connection) -> int | None:
    return db.execute("SELECT max(start) FROM starts").fetchone()[0]


def last_start_row(db: sqlite3.Connection) -> tuple[int | None, int | None, int]:
    """Number, step that it went on from, groups that it returned; (None, None, 0) before the first."""
    row = db.execute("SELECT start, from_step, returned FROM starts ORDER BY start DESC LIMIT 1").fetchone()
    return row or (None, None, 0)


def last_limits(db: sqlite3.Connection) -> Limits:
    row = db.execute("SELECT max_staleness, credits, retries FROM starts ORDER BY start DESC LIMIT 1").fetchone()
    return Limits(max_staleness=row[0], credits=row[1], retries=row[2]) if row else Limits()


def last_version(db: sqlite3.Connection) -> int:
    """Of the newest step in the surviving lineage; 0 before the first."""
    return db.execute("SELECT max(version) FROM steps WHERE dropped_start IS NULL").fetchone()[0] or 0


def last_commit(db: sqlite3.Connection) -> int:
    """The newest committed step of the surviving lineage; 0 before the first."""
    newest = "SELECT max(version) FROM steps WHERE dropped_start IS NULL AND committed_at IS NOT NULL"
    return db.execute(newest).fetchone()[0] or 0


def live_step(db: sqlite3.Connection, version: int) -> tuple[int, int] | None:
    """Row and start of step `version` in the surviving lineage."""
    return db.execute(
        "SELECT step, start FROM steps WHERE version = ? AND dropped_start IS NULL", (version,)
    ).fetchone()


def trained_in(db: sqlite3.Connection, number: int) -> int | None:
    """Version of the live step that holds a group."""
    row = db.execute(
        "SELECT version FROM step_groups JOIN steps USING (step) WHERE number = ? AND is_live", (number,)
    ).fetchone()
    return row[0] if row else None


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
