"""`miles ledger RUN`: the whole ledger on one screen, and queries of one's own."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from miles_core.text import visible

from . import queries
from .errors import LedgerError
from .schema import SCHEMA_VERSION, reading
from .verify import verify

QUERY_S = 60.0
"""A query of the user's may take this long: a recursive one may have no end."""
MOST_ROWS = 1_000_000
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def overview(path: Path) -> dict[str, Any]:
    """Fates, starts, steps, episodes, evaluations, and what does not hold, as plain data."""
    with reading(path) as db:
        counts = queries.counts(db)
        return {
            "schema": SCHEMA_VERSION,
            "proof": counts.proof(),
            "fates": [
                {"fate": fate, "reason": reason, "groups": groups}
                for fate, reason, groups in db.execute(
                    "SELECT fate, reason, count(*) FROM groups GROUP BY fate, reason ORDER BY 3 DESC"
                )
            ],
            "starts": _dicts(
                db,
                "SELECT start, at, from_step, is_in_place, returned, (SELECT min(version) FROM steps WHERE "
                "steps.start = starts.start) AS first_step, (SELECT max(version) FROM steps WHERE "
                "steps.start = starts.start) AS last_step FROM starts ORDER BY start",
            ),
            "steps": _dicts(
                db,
                "SELECT sum(dropped_start IS NULL) AS live, sum(dropped_start IS NULL AND committed_at IS NOT NULL) "
                "AS committed, sum(dropped_start IS NOT NULL) AS dropped FROM steps",
            )[0],
            "episodes": _dicts(
                db,
                "SELECT outcome, count(*) AS episodes, avg(reward) AS mean_reward, sum(loss_tokens) AS loss_tokens "
                "FROM episodes GROUP BY outcome ORDER BY 2 DESC",
            ),
            "failed_attempts": db.execute("SELECT count(*) FROM attempts").fetchone()[0],
            "evaluations": _dicts(
                db,
                "SELECT dataset, count(score) AS points, sum(score IS NULL) AS skipped, max(score) AS best "
                "FROM evaluations GROUP BY dataset ORDER BY dataset",
            ),
            "happenings": _dicts(db, "SELECT kind, count(*) AS times FROM happenings GROUP BY kind ORDER BY 2 DESC"),
            "problems": verify(db),
        }


def to_text(data: dict[str, Any]) -> str:
    """`overview` for a terminal."""
    steps = {name: value or 0 for name, value in data["steps"].items()}
    parts = [
        data["proof"],
        f"steps: {steps['live']}, committed {steps['committed']}; dropped by rewinds: {steps['dropped']}",
        f"failed attempts that were repeated: {data['failed_attempts']}",
    ]
    starts = [{**start, "at": _time(start["at"])} for start in data["starts"]]
    for title, rows in (
        ("fates", data["fates"]),
        ("starts", starts),
        ("episodes", data["episodes"]),
        ("evaluations", data["evaluations"]),
        ("what else happened", data["happenings"]),
    ):
        if rows:
            parts += ["", title, table(list(rows[0]), [list(row.values()) for row in rows])]
    problems = data["problems"]
    parts += ["", "does not hold:" if problems else "every invariant holds", *(f"  {line}" for line in problems)]
    return "\n".join(parts)


def query(path: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of one SELECT over the ledger, which it cannot change.

    Raises:
        LedgerError: it is no SELECT, SQLite refuses it, or it has no end within `QUERY_S` and `MOST_ROWS`.
    """
    with reading(path) as db:
        end = time.monotonic() + QUERY_S
        db.set_progress_handler(lambda: time.monotonic() > end, 100_000)  # Ctrl-C gets its turn there too
        db.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        try:
            cursor = db.execute(sql)
            rows = cursor.fetchmany(MOST_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            if time.monotonic() > end:
                raise LedgerError(
                    f"The query took longer than {QUERY_S:g} s and was stopped. Make it smaller."
                ) from error
            tables = (
                "starts, groups, changes, episodes, attempts, steps, step_groups, segments, happenings, evaluations"
            )
            raise LedgerError(
                f"The query failed: {str(error).rstrip('.')}. It is one SELECT over the tables {tables}; see "
                "`SELECT sql FROM sqlite_schema`."
            ) from error
        if len(rows) > MOST_ROWS:
            raise LedgerError(f"The query has more than {MOST_ROWS:,} rows. Count them, or say LIMIT.")
        if cursor.description is None:
            raise LedgerError("The query is empty; give one SELECT.")
        return [column[0] for column in cursor.description], rows


def to_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    twice = [name for number, name in enumerate(columns) if name in columns[:number]]
    if twice:
        raise LedgerError(f"Two columns are called {twice[0]!r}, and JSON would lose one. Name them apart with AS.")
    return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2, default=repr)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns side by side, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
        return ("  " + "  ".join(padded)).rstrip()

    return "\n".join([line(columns), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value)).replace("\n", "")


def _dicts(db: sqlite3.Connection, sql: str) -> list[dict[str, Any]]:
    cursor = db.execute(sql)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
