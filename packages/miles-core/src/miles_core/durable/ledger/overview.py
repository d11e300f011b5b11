"""`miles ledger RUN`: the whole ledger on one screen, the invariants that it keeps, and queries of one's own."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_rollout.fates import Fate

from miles_core.text import format_time, table

from . import queries
from .queries import effective_versions
from .schema import SCHEMA_VERSION, LedgerError, reading

QUERY_S = 60.0
"""A query of the user's may take this long: a recursive one may have no end."""
MAX_ROWS = 1_000_000
EXAMPLES = 3
"""Cases that a sentence about a broken invariant names."""
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

_FINAL = ", ".join(f"'{fate}'" for fate in Fate if fate.is_final)
_LISTS = {
    "fates": "SELECT fate, reason, count(*) AS groups FROM groups GROUP BY fate, reason ORDER BY 3 DESC",
    "starts": "SELECT start, starts.at, from_step, is_in_place, returned, min(version) AS first_step, "
    "max(version) AS last_step FROM starts LEFT JOIN steps USING (start) GROUP BY start ORDER BY start",
    "episodes": "SELECT outcome, count(*) AS episodes, avg(reward) AS mean_reward, sum(loss_tokens) AS loss_tokens "
    "FROM episodes GROUP BY outcome ORDER BY 2 DESC",
    "evaluations": "SELECT dataset, count(score) AS points, sum(score IS NULL) AS skipped, max(score) AS best "
    "FROM evaluations GROUP BY dataset ORDER BY dataset",
    "happenings": "SELECT kind, count(*) AS times FROM happenings GROUP BY kind ORDER BY 2 DESC",
}
_STEPS = (
    "SELECT count(*) - count(dropped_start) AS live, count(*) FILTER (WHERE dropped_start IS NULL AND committed_at IS "
    "NOT NULL) AS committed, count(dropped_start) AS dropped FROM steps"
)


def overview(path: Path) -> dict[str, Any]:
    """Fates, starts, steps, episodes, evaluations, and what contradicts what, as plain data."""
    with reading(path) as db:
        db.row_factory = sqlite3.Row
        return {
            "schema": SCHEMA_VERSION,
            "proof": queries.counts(db).proof(),
            "steps": dict(db.execute(_STEPS).fetchone()),
            "failed_attempts": db.execute("SELECT count(*) FROM attempts").fetchone()[0],
            **{name: [dict(row) for row in db.execute(sql)] for name, sql in _LISTS.items()},
            "problems": verify(db),
        }


def to_text(data: dict[str, Any]) -> str:
    """`overview` for a terminal."""
    steps, problems = data["steps"], data["problems"]
    lines = [
        data["proof"],
        f"steps: {steps['live']}, committed {steps['committed']}; dropped by rewinds: {steps['dropped']}",
        f"failed attempts that were repeated: {data['failed_attempts']}",
    ]
    starts = [{**start, "at": format_time(start["at"])} for start in data["starts"]]
    for name, rows in ({name: data[name] for name in _LISTS} | {"starts": starts}).items():
        if rows:
            title = "what else happened" if name == "happenings" else name
            lines += ["", title, table(list(rows[0]), [list(row.values()) for row in rows])]
    lines += ["", "does not hold:" if problems else "every invariant holds", *(f"  {line}" for line in problems)]
    return "\n".join(lines)


def query(path: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of one SELECT over the ledger, which it cannot change.

    Raises:
        LedgerError: it is no SELECT, SQLite refuses it, or it has no end within `QUERY_S` and `MAX_ROWS`.
    """
    with reading(path) as db:
        end = time.monotonic() + QUERY_S
        db.set_progress_handler(lambda: time.monotonic() > end, 100_000)  # Ctrl-C is answered there too
        db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        try:
            cursor = db.execute(sql)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            if time.monotonic() > end:
                raise LedgerError(
                    f"The query took longer than {QUERY_S:g} s and was stopped. Make it smaller."
                ) from error
            raise LedgerError(
                f"The query failed: {str(error).rstrip('.')}. It is one SELECT over the tables starts, groups, "
                "changes, episodes, attempts, steps, step_groups, segments, happenings, evaluations; see "
                "`SELECT sql FROM sqlite_schema`."
            ) from error
        if len(rows) > MAX_ROWS:
            raise LedgerError(f"The query has more than {MAX_ROWS:,} rows. Count them, or say LIMIT.")
        if cursor.description is None:
            raise LedgerError("The query is empty; give one SELECT.")
        return [column[0] for column in cursor.description], rows


def to_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    twice = [name for number, name in enumerate(columns) if name in columns[:number]]
    if twice:
        raise LedgerError(f"Two columns are called {twice[0]!r}, and JSON would lose one. Name them apart with AS.")
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2, default=repr)


def verify(db: sqlite3.Connection) -> list[str]:
    """A sentence for each invariant of the run that its rows break: changes, groups and steps are recorded apart."""
    (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        return [f"The file is damaged: {' '.join(state.split())}."]
    checks = (
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
