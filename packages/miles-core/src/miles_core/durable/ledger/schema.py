"""The file `ledger.db`: its tables, how an older one becomes a present one, and the connections that read and write.

The schema is the sum of its steps, `schema_1.sql` and on: a new file runs all of them, an older one what it lacks.

    starts ◀─ groups ◀─┬─ changes       every change of fate, in order
                       ├─ episodes ◀─ attempts      the earlier, failed ones of an episode
                       └─ step_groups ─▶ steps      optimizer steps; rows of a dead branch stay, `is_live` = 0
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from miles_tito.errors import MilesError

T = TypeVar("T")

APPLICATION_ID = 0x4D4C4547
"""`MLEG`, in the header of the file."""

SCHEMA_VERSION = 2
STEPS = tuple(
    Path(__file__).with_name(f"schema_{number}.sql").read_text(encoding="utf-8")
    for number in range(1, SCHEMA_VERSION + 1)
)
"""Each adds to those before it; what was released is never changed."""


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


class Transactions:
    """Groups the ledger's writes into transactions. After the first that fails nothing is written any more."""

    def __init__(self, db: sqlite3.Connection, *, path: Path) -> None:
        self._db = db
        self._path = path
        self._failure: LedgerError | None = None
        self._is_closed = False
        self._watchers: list[asyncio.Future[None]] = []

    def flush(self) -> None:
        """End the present transaction, so that readers see it and a killed process leaves it behind."""
        if self._failure is not None:
            raise self._failure
        if self._db.in_transaction:
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._fail(error) from error

    async def watch(self) -> None:
        """Runs until a write fails, and raises it: there may be no further call that would."""
        if self._failure is not None:
            raise self._failure
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        try:
            await watcher
        finally:
            self._watchers.remove(watcher)

    def close(self) -> None:
        """Write what is left; the file alone then is the whole ledger. Once more does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._db.close()

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return query(self._db)
        except sqlite3.DatabaseError as error:
            raise damaged(self._path, error) from error

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """Writes in the present tick's transaction, which ends with the tick; with this block where no loop runs."""
        if self._failure is not None:
            raise self._failure
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
                if loop is not None:
                    loop.call_soon(self._flush_tick)
            yield self._db
        except sqlite3.Error as error:
            raise self._fail(error) from error
        finally:
            if loop is None and self._failure is None:
                self.flush()

    def _durably(self, write: Callable[[sqlite3.Connection], object]) -> None:
        """`write` in a transaction of its own, on the device with all before it when this returns."""
        self.flush()
        try:
            self._db.execute("PRAGMA synchronous = FULL")
            with self._writing() as db:
                write(db)
            self.flush()
        finally:
            if self._failure is None:
                self.flush()  # what `write` refused has changed nothing
                self._db.execute("PRAGMA synchronous = NORMAL")

    def _flush_tick(self) -> None:
        if not self._is_closed:
            with suppress(LedgerError):  # kept: the next call raises it, and `watch` does now
                self.flush()

    def _fail(self, error: sqlite3.Error) -> LedgerError:
        """Nothing is written any more: what came after this would stand behind a hole."""
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        cause = "an event contradicts what it holds" if isinstance(error, sqlite3.IntegrityError) else "free disk space"
        self._failure = LedgerError(
            f"{self._path} cannot be written: {error} ({cause}). The run can be resumed and goes on from what was "
            "recorded before."
        )
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_exception(self._failure)
        return self._failure


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
