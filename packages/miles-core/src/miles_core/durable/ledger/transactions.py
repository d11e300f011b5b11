"""The connection that writes: a transaction for each tick of the event loop, and what happens when one fails."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from .schema import LedgerError, damaged

T = TypeVar("T")


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
