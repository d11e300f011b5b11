"""The tables of `ledger.db`, and how an older file becomes a present one.

The schema is the sum of its steps: a new file runs all of them, an older one those that it lacks.

    starts ◀─ groups ◀─┬─ changes       every change of fate, in order
                       ├─ episodes ◀─ attempts      the earlier, failed ones of an episode
                       └─ step_groups ─▶ steps      optimizer steps; rows of a dead branch stay, `is_live` = 0
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from miles_tito.errors import MilesError

APPLICATION_ID = 0x4D4C4547
"""`MLEG`, in the header of the file."""

_RUN = """
CREATE TABLE starts (
    start INTEGER PRIMARY KEY,
    from_step INTEGER,              -- the committed step it goes on from, NULL for a fresh run
    at REAL NOT NULL,               -- seconds since 1970, as every `at` here
    is_in_place INTEGER NOT NULL,   -- the trainer went back, the process stayed
    returned INTEGER NOT NULL,      -- groups of dropped steps that went back to the buffer
    max_staleness INTEGER,
    credits INTEGER,
    retries INTEGER NOT NULL,
    info TEXT NOT NULL              -- JSON
);
CREATE TABLE segments (
    segment INTEGER PRIMARY KEY,
    file TEXT NOT NULL UNIQUE       -- in trajectories/
);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,     -- order of issue, from 0
    group_id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    issued_start INTEGER NOT NULL REFERENCES starts,
    issued_at REAL NOT NULL,
    issued_version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,       -- first one of the present issue
    drawn INTEGER,                  -- prompts drawn from the stream up to its issue
    retry_of TEXT,
    is_retry_due INTEGER NOT NULL,  -- its prompt is to run again and was not issued again yet
    finished_at REAL,
    segment INTEGER REFERENCES segments,
    offset INTEGER,
    oldest_version INTEGER,         -- as recorded, labels of dead branches included
    newest_version INTEGER
);
CREATE INDEX groups_prompt ON groups (prompt_id);
CREATE INDEX groups_open ON groups (number) WHERE fate IN ('in_flight', 'buffered');
CREATE INDEX groups_retry ON groups (number) WHERE is_retry_due;
CREATE TABLE changes (
    change INTEGER PRIMARY KEY,
    number INTEGER NOT NULL REFERENCES groups,
    what TEXT NOT NULL,             -- issued, reissued, returned, or a fate
    reason TEXT NOT NULL,
    version INTEGER NOT NULL,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
CREATE INDEX changes_group ON changes (number);
CREATE TABLE episodes (
    number INTEGER NOT NULL REFERENCES groups,
    episode INTEGER NOT NULL,
    episode_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reward REAL,
    error TEXT,
    attempt INTEGER NOT NULL,
    seconds REAL NOT NULL,
    finished_at REAL,
    trajectories INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    loss_tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    is_masked INTEGER NOT NULL DEFAULT 0,   -- too old: counted for the baseline, not trained
    PRIMARY KEY (number, episode),
    CHECK ((reward IS NULL) = (outcome NOT IN ('graded', 'policy_limit')))
) WITHOUT ROWID;
CREATE TABLE attempts (
    number INTEGER NOT NULL REFERENCES groups,
    episode INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    error TEXT,
    seconds REAL NOT NULL,
    finished_at REAL NOT NULL,
    PRIMARY KEY (number, episode, attempt)
) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,       -- of the weights that it made
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL,
    committed_at REAL,
    checkpoint TEXT,                -- where it is the newest step of one
    dropped_start INTEGER REFERENCES starts     -- the start that went back behind it
);
CREATE UNIQUE INDEX steps_live ON steps (version) WHERE dropped_start IS NULL;
CREATE TABLE step_groups (
    step INTEGER NOT NULL REFERENCES steps,
    number INTEGER NOT NULL REFERENCES groups,
    is_live INTEGER NOT NULL,
    PRIMARY KEY (step, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX trained_once ON step_groups (number) WHERE is_live;
"""

_EVENTS = """
ALTER TABLE steps ADD COLUMN facts TEXT NOT NULL DEFAULT '{}';      -- JSON: seconds, tokens, …
CREATE TABLE happenings (
    happening INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,             -- engine, worker, trainer, session, alarm, …
    subject TEXT NOT NULL,
    text TEXT NOT NULL,
    version INTEGER,
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
CREATE TABLE evaluations (
    evaluation INTEGER PRIMARY KEY,
    dataset TEXT NOT NULL,
    version INTEGER NOT NULL,       -- of the weights that were evaluated
    logged_version INTEGER NOT NULL,    -- that the trainer had when the result came: the lag is the difference
    score REAL,                     -- NULL for a skipped point
    reason TEXT NOT NULL,           -- why it was skipped
    seconds REAL NOT NULL,
    metrics TEXT NOT NULL,          -- JSON
    start INTEGER NOT NULL REFERENCES starts,
    at REAL NOT NULL
);
"""

STEPS = (_RUN, _EVENTS)
SCHEMA_VERSION = len(STEPS)


class LedgerError(MilesError, RuntimeError):
    """The ledger cannot be opened or written, or an event contradicts what it holds. The run can be resumed."""


def connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """The file at `path` for its one writer, made or migrated where that is needed.

    Raises:
        LedgerError: it is absent (without `create`), damaged, no ledger, or written by a newer Miles.
    """
    if not create and not path.exists():
        raise LedgerError(f"There is no ledger at {path}. Name the directory of a run that was started.")
    db = _open(path, f"mode={'rwc' if create else 'rw'}")
    with _closed_on_error(db, path):
        if not _objects(db):
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        version = _checked_version(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        _migrate(db, version)
    return db


def connect_readonly(path: Path) -> sqlite3.Connection:
    """The file at `path`, also while a run writes it; every read sees whole transactions.

    Raises:
        LedgerError: it is absent, damaged, no ledger, or written by a newer Miles.
    """
    if not path.exists():
        raise LedgerError(f"There is no ledger at {path}. Name the directory of a run that was started.")
    # Beside a log that nobody may write next to, the file has to be taken as it is.
    alone = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    db = _open(path, "immutable=1" if alone else "mode=ro")
    with _closed_on_error(db, path):
        if not _objects(db):
            raise LedgerError(f"{path} is empty: its run ended before it began.")
        version = _checked_version(db, path)
        if version < SCHEMA_VERSION:  # which a reader needs in the present schema, and must not change
            file, db = db, sqlite3.connect(":memory:", isolation_level=None)
            file.backup(db)
            file.close()
            _migrate(db, version)
        db.execute("PRAGMA query_only = ON")
    return db


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """`connect_readonly` for a block; what cannot be read in it becomes a LedgerError."""
    db = connect_readonly(path)
    try:
        yield db
    except sqlite3.DatabaseError as error:
        raise damaged(path, error) from error
    finally:
        db.close()


def damaged(path: Path, error: sqlite3.Error) -> LedgerError:
    """What to say when SQLite cannot make sense of the file."""
    return LedgerError(
        f"{path} cannot be read: {error}. If the file is damaged, restore it together with trajectories/ and "
        "checkpoints/ from one copy of the run; without it nothing proves which groups were trained."
    )


def _open(path: Path, options: str) -> sqlite3.Connection:
    if path.exists() and not path.is_file():  # SQLite would wait on a pipe for ever
        raise LedgerError(f"{path} is no file; a ledger is. Name the directory of a run.")
    uri = f"file:{quote(str(path))}?{options}"
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30.0, check_same_thread=False)
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be opened: {error}.") from error


@contextmanager
def _closed_on_error(db: sqlite3.Connection, path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        db.close()
        raise damaged(path, error) from error
    except LedgerError:
        db.close()
        raise


def _migrate(db: sqlite3.Connection, version: int) -> None:
    """Each step with its number in one transaction: a process that dies in between leaves a whole older schema."""
    for number in range(version, SCHEMA_VERSION):
        db.executescript(f"BEGIN IMMEDIATE; {STEPS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _objects(db: sqlite3.Connection) -> int:
    return db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]


def _checked_version(db: sqlite3.Connection, path: Path) -> int:
    """The file's schema version."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise LedgerError(f"{path} is no ledger of Miles: its application id is {application:#x}.")
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema {version}, written by a newer Miles; this one knows up to {SCHEMA_VERSION}. Upgrade."
        )
    return version
