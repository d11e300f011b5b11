"""`miles ledger RUN`: the whole ledger on one screen, and queries of one's own."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_core.text import format_time, table

from . import queries
from .schema import SCHEMA_VERSION, LedgerError, reading
from .verify import verify

QUERY_S = 60.0
"""A query of the user's may take this long: a recursive one may have no end."""
MAX_ROWS = 1_000_000
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)

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
        return {
            "schema": SCHEMA_VERSION,
            "proof": queries.counts(db).proof(),
            "steps": _rows(db, _STEPS)[0],
            "failed_attempts": db.execute("SELECT count(*) FROM attempts").fetchone()[0],
            **{name: _rows(db, sql) for name, sql in _LISTS.items()},
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


def _rows(db: sqlite3.Connection, sql: str) -> list[dict[str, Any]]:
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
