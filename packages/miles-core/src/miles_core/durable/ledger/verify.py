"""The invariants of a run, each checked against the ledger's rows; a sentence for each one that is broken.

Changes, groups and steps are recorded apart; where two of them hold the same fact, they are compared.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator

from miles_rollout.fates import Fate

from . import queries
from .queries import effective_versions

EXAMPLES = 3
"""Cases that a sentence names."""

_FINAL = ", ".join(f"'{fate}'" for fate in Fate if fate.is_final)


def verify(db: sqlite3.Connection) -> list[str]:
    """What contradicts what; empty when every invariant is kept."""
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        return [f"The file is damaged: {' '.join(state.split())}."]
    checks: tuple[Callable[[sqlite3.Connection], Iterator[str]], ...] = (
        _every_group_has_one_fate,
        _every_group_is_trained_once,
        _steps_are_whole,
        _credits_are_kept,
        _nothing_trained_is_too_old,
        _rewards_are_earned,
    )
    return [sentence for check in checks for sentence in check(db)]


def _every_group_has_one_fate(db: sqlite3.Connection) -> Iterator[str]:
    """issued = sum of fates + open, from the changes and from the groups."""
    counts = queries.counts(db)
    (issued,) = db.execute("SELECT count(*) FROM changes WHERE what = 'issued'").fetchone()
    if issued != counts.issued:
        yield f"{issued} groups were issued, but {counts.issued} are known: {abs(counts.issued - issued)} are lost."
    if counts.lost:
        yield f"{counts.lost} of {counts.issued} groups have a fate that does not exist."
    yield from _about(
        "issued more or less often than once",
        db.execute("SELECT number FROM changes GROUP BY number HAVING sum(what = 'issued') <> 1"),
        db,
    )
    # SQLite takes a bare column beside max() from the row of the maximum.
    yield from _about(
        "with another fate than the last change gave",
        db.execute(
            "SELECT number FROM groups LEFT JOIN (SELECT number, what, max(change) FROM changes GROUP BY number) "
            "USING (number) WHERE fate IS NOT CASE what WHEN 'issued' THEN 'in_flight' "
            "WHEN 'reissued' THEN 'in_flight' WHEN 'returned' THEN 'buffered' ELSE what END"
        ),
        db,
    )
    yield from _about(
        "with two final fates",
        db.execute(
            f"SELECT number FROM changes GROUP BY number HAVING sum(what IN ({_FINAL})) - sum(what = 'returned') > 1"
        ),
        db,
    )


def _every_group_is_trained_once(db: sqlite3.Connection) -> Iterator[str]:
    yield from _about(
        "in more than one step of the surviving lineage",
        db.execute(
            "SELECT number FROM step_groups JOIN steps USING (step) WHERE dropped_start IS NULL "
            "GROUP BY number HAVING count(*) > 1"
        ),
        db,
    )
    yield from _about(
        "trained but in no step that survives, or in one without being trained",
        db.execute(
            "SELECT number FROM groups LEFT JOIN (SELECT number, step FROM step_groups JOIN steps USING (step) "
            "WHERE dropped_start IS NULL) USING (number) WHERE (fate = 'trained') <> (step IS NOT NULL)"
        ),
        db,
    )
    yield from _about(
        "trained without a recorded result",
        db.execute("SELECT number FROM groups WHERE fate = 'trained' AND finished_at IS NULL"),
        db,
    )


def _steps_are_whole(db: sqlite3.Connection) -> Iterator[str]:
    """Steps of the surviving lineage count 1, 2, 3, …, and are committed in this order."""
    steps = list(db.execute("SELECT version, committed_at FROM steps WHERE dropped_start IS NULL ORDER BY version"))
    missing = sorted(set(range(1, len(steps) + 1)) - {version for version, _ in steps})
    if missing:
        yield f"Steps {', '.join(map(str, missing[:EXAMPLES]))} are missing before step {steps[-1][0]}."
    newest = max((version for version, at in steps if at is not None), default=0)
    late = [version for version, at in steps if at is None and version < newest]
    if late:
        yield f"Step {newest} is committed but step {late[0]} before it is not."


def _credits_are_kept(db: sqlite3.Connection) -> Iterator[str]:
    """Whenever a group is issued, at most `credits` are open with it, those that a rewind returned included."""
    over = db.execute(
        "SELECT group_id, open, credits FROM (SELECT change, number, start, what, "
        f"sum(CASE WHEN what IN ('issued', 'returned') THEN 1 WHEN what IN ({_FINAL}) THEN -1 ELSE 0 END) "
        "OVER (ORDER BY change) AS open FROM changes) JOIN starts USING (start) JOIN groups USING (number) "
        "WHERE what = 'issued' AND open > credits ORDER BY change LIMIT 1"
    ).fetchone()
    if over:
        yield f"With group {over[0]} {over[1]} groups were open, more than the {over[2]} credits."


def _nothing_trained_is_too_old(db: sqlite3.Connection) -> Iterator[str]:
    """Trained tokens are at most `max_staleness` versions older than the weights that they trained."""
    steps = queries.rewinds(db)
    too_old: list[tuple[str, int, int]] = []
    number = 0
    for name, issued, issued_start, start, version, limit, oldest, newest in db.execute(
        "SELECT group_id, issued_version, issued_start, steps.start, steps.version, starts.max_staleness, "
        "min(episodes.oldest_version), max(episodes.newest_version) "
        "FROM steps JOIN step_groups USING (step) JOIN groups USING (number) JOIN starts ON starts.start = steps.start "
        "JOIN episodes ON episodes.number = groups.number AND NOT is_masked "
        "WHERE dropped_start IS NULL AND starts.max_staleness IS NOT NULL GROUP BY step_groups.number"
    ):
        oldest = issued if oldest is None else oldest
        later = [step for rewound, step in steps if issued_start < rewound <= start]
        oldest, _ = effective_versions(oldest, max(oldest, newest or 0), later)
        if version - 1 - oldest > limit:
            number += 1
            too_old.append((name, version - 1 - oldest, limit))
            del too_old[EXAMPLES:]
    if number:
        cases = ", ".join(f"{name} was {age} versions old (limit {limit})" for name, age, limit in too_old)
        yield f"{number} trained too old: {cases}."


def _rewards_are_earned(db: sqlite3.Connection) -> Iterator[str]:
    yield from _about(
        "with an episode whose outcome carries no reward and that has one, or the reverse",
        db.execute(
            "SELECT DISTINCT number FROM episodes WHERE (reward IS NULL) <> (outcome NOT IN ('graded', 'policy_limit'))"
        ),
        db,
    )


def _about(what: str, rows: Iterable[tuple[int]], db: sqlite3.Connection) -> Iterator[str]:
    """One sentence about all groups in `rows`, if there are any."""
    numbers = [number for (number,) in rows]
    if numbers:
        names = ", ".join(queries.group_id(db, number) for number in numbers[:EXAMPLES])
        more = ", …" if len(numbers) > EXAMPLES else ""
        yield f"{len(numbers)} {'group' if len(numbers) == 1 else 'groups'} {what}: {names}{more}."
