"""The run's book of what became of every group, episode and attempt, in SQLite.

One process writes it: the driver. Everything that happens in one tick of its event loop is one transaction, so a
process that is killed leaves a whole prefix of what happened. Those transactions reach the operating system at once
and the device with the next `sync` or `commit`, which a checkpoint makes before and after it is complete.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_rollout.fates import Fate, FateCounts, FateEvent
from miles_rollout.policies import MASKED_EPISODES
from miles_tito.records.summary import EpisodeSummary, GroupRef

from . import queries
from .errors import LedgerError
from .records import Limits, OpenGroup, PendingRetry
from .schema import connect
from .transactions import Transactions
from .verify import verify

LEDGER = "ledger.db"


class Ledger(Transactions):
    """Observes the buffer, and is told of everything else that must outlive the process.

    After a write error (a full disk) every further call raises it: nothing is recorded behind a hole.
    """

    def __init__(self, db: sqlite3.Connection, *, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(db, path=path)
        self._clock = clock
        self._start: int | None = None
        self._has_begun = False
        """Whether this process has made a start of its own."""
        self._begun_after = -1
        """Writes up to the present start: whether anything has happened since."""
        self._numbers: dict[str, int] = {}
        """Of open groups, by id."""
        self._segments: dict[str, int] = {}

    @classmethod
    def open(cls, path: Path, *, create: bool = False, clock: Callable[[], float] = time.time) -> Ledger:
        """The ledger at `path`; an older schema is brought up to date. That one process writes, the run's lock sees to.

        Raises:
            LedgerError: it is absent (without `create`), damaged, or written by a newer Miles.
        """
        ledger = cls(connect(path, create=create), path=path, clock=clock)
        with ledger._reading() as db:
            ledger._numbers = queries.open_numbers(db)
            ledger._segments = dict(db.execute("SELECT file, segment FROM segments"))
        return ledger

    # ---- starts and rewinds

    @property
    def is_new(self) -> bool:
        """Whether no run has begun in it."""
        with self._reading() as db:
            return queries.last_start(db) is None

    def start(
        self, from_step: int | None = None, *, limits: Limits | None = None, info: Mapping[str, object] | None = None
    ) -> int:
        """Begin, or go on from committed step `from_step`; returns the number of this start.

        Groups of later steps go back to the buffer. Those that ran are issued again: adopt what the spool holds of
        them before. Calling it twice in a row is the same as once.

        Args:
            from_step: None for a run that never began; 0 for the weights before the first step.
            limits: what `verify` holds the groups of this start against.
            info: plain data about this start: versions, host, what was resumed.
        """
        self._go_on(from_step, limits=limits, info=info, in_place=False)
        assert self._start is not None, "_go_on sets it"
        return self._start

    def rewind(self, to_step: int) -> int:
        """Go back to committed step `to_step` inside this process; returns how many groups the buffer gets back.

        A start like any other, under the limits of the last: what runs is issued again under its id. Right after
        `start(to_step)` it does nothing but answer.
        """
        with self._reading() as db:
            limits = queries.last_limits(db)
        return self._go_on(to_step, limits=limits, info=None, in_place=self._has_begun)

    # ---- groups

    def __call__(self, event: FateEvent) -> None:
        """One change of fate, from the buffer."""
        with self._recording() as db:
            if event.fate is Fate.IN_FLIGHT:
                self._issue(db, event)
                return
            number = self._open_number(db, event.group_id, wanted=event.fate)
            if event.fate is Fate.TRAINED:
                self._join_step(db, event.version, [number])
            db.execute(
                "UPDATE groups SET fate = ?, reason = ?, is_retry_due = ? WHERE number = ?",
                (event.fate, event.reason, event.will_retry, number),
            )
            self._change(db, number, event.fate, event.reason, event.version)
            if event.fate.is_final:
                del self._numbers[event.group_id]

    def finished(self, ref: GroupRef) -> None:
        """A group is durable in the spool (its place in `metadata["spool"]`) and about to meet the filter."""
        with self._recording() as db:
            number = self._open_number(db, ref.id, wanted=None)
            place = self._place(db, ref)
            versions = [v for t in _trajectories(ref) for v in (t.oldest_version, t.newest_version) if v is not None]
            known = [version for version in versions if version >= 0]
            updated = db.execute(
                "UPDATE groups SET finished_at = ?, segment = ?, offset = ?, oldest_version = ?, newest_version = ? "
                "WHERE number = ? AND finished_at IS NULL",
                (self._clock(), *place, min(known, default=None), max(known, default=None), number),
            )
            if not updated.rowcount:
                raise LedgerError(f"Group {ref.id!r} has finished before; a group finishes once.")
            db.executemany(
                "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                [_episode_row(number, index, episode) for index, episode in enumerate(ref.episodes)],
            )
            attempts = [
                (number, index, a.attempt, a.outcome, a.error, a.seconds, a.finished_at)
                for index, episode in enumerate(ref.episodes)
                for a in episode.failed_attempts
            ]
            if attempts:
                db.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", attempts)

    def awaited(self) -> dict[str, float]:
        """Open groups without a result: id -> when they were last issued."""
        with self._reading() as db:
            return queries.awaited(db)

    def adopt(self, ref: GroupRef) -> bool:
        """Take a spooled group whose end an earlier start did not get to record; False if it is not awaited.

        Comes before `start`: the group belongs to the start that ran it.
        """
        number = self._numbers.get(ref.id)
        with self._reading() as db:
            awaited = number is not None and queries.awaits_record(
                db, number, attempt=min((e.attempt for e in ref.episodes), default=0)
            )
            self._start = self._start if self._start is not None else queries.last_start(db)
        if awaited:
            self.finished(ref)
        return awaited

    def abort_open(self, reason: str) -> int:
        """The run is over: every open group becomes aborted; returns how many there were."""
        with self._recording() as db:
            version = queries.last_version(db)
            for number in self._numbers.values():
                db.execute("UPDATE groups SET fate = ?, reason = ? WHERE number = ?", (Fate.ABORTED, reason, number))
                self._change(db, number, Fate.ABORTED, reason, version)
            aborted = len(self._numbers)
            self._numbers.clear()
        return aborted

    # ---- steps

    def step(self, version: int, groups: Sequence[GroupRef | str], *, facts: Mapping[str, float] | None = None) -> None:
        """The engines hold weights `version`, trained on `groups`; before or after these become TRAINED.

        Raises:
            LedgerError: one of them is in another step of this lineage.
        """
        with self._recording() as db:
            numbers = [self._number(db, group if isinstance(group, str) else group.id) for group in groups]
            step = self._join_step(db, version, numbers)
            if facts:
                db.execute("UPDATE steps SET facts = ? WHERE step = ?", (_json(facts), step))
            masked = [
                (number, episode)
                for number, group in zip(numbers, groups, strict=True)
                if isinstance(group, GroupRef)
                for episode in group.metadata.get(MASKED_EPISODES, ())
            ]
            db.executemany("UPDATE episodes SET is_masked = 1 WHERE number = ? AND episode_id = ?", masked)

    def sync(self) -> None:
        """Everything so far is on the device; for the moment before a checkpoint is marked complete."""
        # A transaction without a change would not reach the log, and so would not flush it.
        self._durably(lambda db: db.execute("UPDATE starts SET at = at WHERE start = ?", (self._start,)))

    def commit(self, version: int, checkpoint: str) -> None:
        """The checkpoint of step `version` is complete: this step and those before it are committed, on the device."""

        def mark(db: sqlite3.Connection) -> None:
            live = "dropped_start IS NULL AND version"
            if version and not db.execute(f"SELECT 1 FROM steps WHERE {live} = ?", (version,)).fetchone():
                raise LedgerError(
                    f"Checkpoint {checkpoint!r} is of step {version}, which this ledger does not hold: its newest "
                    f"step is {queries.last_version(db)}."
                )
            db.execute(
                f"UPDATE steps SET committed_at = ? WHERE {live} <= ? AND committed_at IS NULL",
                (self._clock(), version),
            )
            db.execute(f"UPDATE steps SET checkpoint = ? WHERE {live} = ?", (checkpoint, version))

        self._durably(mark)

    # ---- what else happened

    def event(self, kind: str, subject: str, text: str, *, version: int | None = None) -> None:
        """Something happened to a part of the run: an engine died, a worker came back, an alarm rang."""
        with self._recording() as db:
            db.execute(
                "INSERT INTO happenings (kind, subject, text, version, start, at) VALUES (?, ?, ?, ?, ?, ?)",
                (kind, subject, text, version, self._start, self._clock()),
            )

    def evaluated(
        self,
        dataset: str,
        *,
        version: int,
        logged_version: int,
        score: float | None,
        reason: str = "",
        seconds: float = 0.0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """An evaluation ended, or was skipped for `reason`.

        Args:
            version: of the weights that were evaluated.
            logged_version: that the trainer has by now.
            score: None for a skipped point.
        """
        with self._recording() as db:
            db.execute(
                "INSERT INTO evaluations (dataset, version, logged_version, score, reason, seconds, metrics, start, "
                "at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(dataset, version, logged_version, score, reason, seconds),
                    *(_json(metrics or {}), self._start, self._clock()),
                ),
            )

    # ---- where a run goes on

    def open_groups(self) -> list[OpenGroup]:
        """Every group without a final fate, in the order of issue."""
        with self._reading() as db:
            return queries.open_groups(db)

    def last_commit(self) -> int:
        """The newest step that a checkpoint has made durable; 0 before the first."""
        with self._reading() as db:
            return queries.last_commit(db)

    def counts(self) -> FateCounts:
        with self._reading() as db:
            return queries.counts(db)

    def next_group(self) -> int:
        """The number that the id of the next new group may carry."""
        with self._reading() as db:
            number, last = queries.last_group(db)
        digits = re.search(r"\d+$", last)
        return max(number + 1, int(digits.group()) + 1 if digits else 0)

    def drawn(self) -> int:
        """Prompts drawn from the stream for all groups issued so far: where the stream goes on."""
        with self._reading() as db:
            return queries.drawn(db)

    def scores(self) -> dict[int, float | None]:
        """Mean score of each evaluated version; None for one without."""
        with self._reading() as db:
            return queries.scores(db)

    def pending_retries(self) -> list[PendingRetry]:
        """Prompts of discarded groups that are to run again, oldest first."""
        with self._reading() as db:
            return queries.pending_retries(db)

    def verify(self) -> list[str]:
        """What contradicts what, as sentences; empty when every invariant holds."""
        with self._reading() as db:
            return verify(db)

    def require_sound(self) -> None:
        """Raise LedgerError with every invariant that does not hold."""
        problems = self.verify()
        if problems:
            raise LedgerError(f"{self._path} contradicts itself:\n" + "\n".join(f"- {line}" for line in problems))

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

    # ---- helpers

    @contextmanager
    def _recording(self) -> Generator[sqlite3.Connection]:
        if self._start is None:
            raise LedgerError("Nothing can be recorded before `start`.")
        with self._writing() as db:
            yield db

    def _go_on(
        self, from_step: int | None, *, limits: Limits | None, info: Mapping[str, object] | None, in_place: bool
    ) -> int:
        """The one way back to a step, of a new process and of this one; returns how many groups were returned."""
        limits, now = limits or Limits(), self._clock()
        self.flush()
        with self._reading() as db:
            last, last_step, returned = queries.last_start_row(db)
            newest = queries.last_version(db)
        if self._begun_after == self._num_writes and (last_step or 0) == (from_step or 0):
            return returned
        if from_step is None and last is not None:
            raise LedgerError(
                f"{self._path} belongs to a run that began before ({last + 1} starts). Resume it from a committed "
                "step, or start a run in another directory."
            )
        if from_step is not None and from_step > newest:
            raise LedgerError(
                f"The run is to go on from step {from_step}, but {self._path} ends at step {newest}: the checkpoint "
                "and the ledger come from different copies of the run."
            )
        start = 0 if last is None else last + 1
        with self._writing() as db:
            db.execute(
                "INSERT INTO starts VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)",
                (
                    *(start, from_step, now, in_place),
                    *(limits.max_staleness, limits.credits, limits.retries, _json(info or {})),
                ),
            )
            self._start = start
            if last is not None:
                db.execute(  # a checkpoint was complete, and the process died before it could say so
                    "UPDATE steps SET committed_at = ? WHERE dropped_start IS NULL AND version <= ? "
                    "AND committed_at IS NULL",
                    (now, from_step or 0),
                )
                returned = self._return_groups(db, from_step or 0)
                db.execute("UPDATE starts SET returned = ? WHERE start = ?", (returned, start))
                self._issue_again(db, last, from_step or 0)
        self.flush()
        self._has_begun, self._begun_after = True, self._num_writes
        return returned

    def _return_groups(self, db: sqlite3.Connection, step: int) -> int:
        """Drop the steps after `step`; what they trained is buffered again."""
        rows = queries.groups_of_steps_after(db, step)
        db.executemany("UPDATE groups SET fate = 'buffered', reason = '' WHERE number = ?", [(n,) for n, _ in rows])
        for number, group_id in rows:
            self._numbers[group_id] = number
            self._change(db, number, "returned", f"back to step {step}", step)
        db.executemany("UPDATE episodes SET is_masked = 0 WHERE number = ? AND is_masked", [(n,) for n, _ in rows])
        dropped = "SELECT step FROM steps WHERE dropped_start IS NULL AND version > ?"
        db.execute(f"UPDATE step_groups SET is_live = 0 WHERE step IN ({dropped})", (step,))
        db.execute(
            "UPDATE steps SET dropped_start = ? WHERE dropped_start IS NULL AND version > ?", (self._start, step)
        )
        return len(rows)

    def _issue_again(self, db: sqlite3.Connection, last: int, step: int) -> None:
        """What ran when the run stopped runs again under its id, as further attempts."""
        (retries,) = db.execute("SELECT retries FROM starts WHERE start = ?", (last,)).fetchone()
        for number in queries.unfinished(db):
            db.execute(
                "UPDATE groups SET issued_start = ?, issued_version = ?, attempt = attempt + ? WHERE number = ?",
                (self._start, step, 1 + retries, number),
            )
            self._change(db, number, "reissued", "", step)

    def _issue(self, db: sqlite3.Connection, event: FateEvent) -> None:
        number = queries.last_group(db)[0] + 1
        try:
            db.execute(
                "INSERT INTO groups (number, group_id, prompt_id, fate, reason, issued_start, issued_at, "
                "issued_version, attempt, drawn, retry_of, is_retry_due) VALUES (?, ?, ?, ?, '', ?, ?, ?, 0, ?, ?, 0)",
                (
                    *(number, event.group_id, event.prompt_id, event.fate, self._start, self._clock()),
                    *(event.version, event.drawn, event.retry_of),
                ),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"Group {event.group_id!r} was issued before; every issue needs a new id.") from error
        if event.retry_of is not None:
            db.execute("UPDATE groups SET is_retry_due = 0 WHERE group_id = ?", (event.retry_of,))
        self._numbers[event.group_id] = number
        self._change(db, number, "issued", "", event.version)

    def _join_step(self, db: sqlite3.Connection, version: int, numbers: Iterable[int]) -> int:
        """Put groups into the live step `version`, made if it is new; returns its row."""
        row = queries.live_step(db, version)
        if row is not None and row[1] != self._start:
            raise LedgerError(f"Step {version} was trained in start {row[1]}; go back behind it with `rewind` first.")
        new: list[int] = []
        for number in numbers:
            other = queries.trained_in(db, number)
            if other is None:
                new.append(number)
            elif other != version:
                raise LedgerError(
                    f"Group {queries.group_id(db, number)!r} was trained in step {other} and cannot enter step "
                    f"{version} as well."
                )
        if row is None:
            cursor = db.execute(
                "INSERT INTO steps (version, start, at) VALUES (?, ?, ?)", (version, self._start, self._clock())
            )
            assert cursor.lastrowid is not None, "an INSERT has a row id"
            row = (cursor.lastrowid, self._start)
        db.executemany("INSERT INTO step_groups VALUES (?, ?, 1)", [(row[0], number) for number in new])
        return row[0]

    def _change(self, db: sqlite3.Connection, number: int, what: str, reason: str, version: int) -> None:
        db.execute(
            "INSERT INTO changes (number, what, reason, version, start, at) VALUES (?, ?, ?, ?, ?, ?)",
            (number, what, reason, version, self._start, self._clock()),
        )

    def _open_number(self, db: sqlite3.Connection, group_id: str, *, wanted: Fate | None) -> int:
        number = self._numbers.get(group_id)
        if number is not None:
            return number
        fate = queries.fate(db, group_id)
        what = f"cannot become {wanted}" if wanted else "cannot finish"
        if fate is None:
            raise LedgerError(f"Group {group_id!r} was never issued, so it {what}.")
        raise LedgerError(f"Group {group_id!r} is already {fate} and {what}: a group has one final fate.")

    def _number(self, db: sqlite3.Connection, group_id: str) -> int:
        """Of any group, open or not."""
        if group_id in self._numbers:
            return self._numbers[group_id]
        row = db.execute("SELECT number FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"Group {group_id!r} was never issued, so it cannot be in a step.")
        return row[0]

    def _place(self, db: sqlite3.Connection, ref: GroupRef) -> tuple[int | None, int | None]:
        """Segment row and offset of a spooled group."""
        place = ref.metadata.get("spool")
        if place is None:
            return None, None
        file, offset = place
        if file not in self._segments:
            cursor = db.execute("INSERT INTO segments (file) VALUES (?)", (file,))
            assert cursor.lastrowid is not None, "an INSERT has a row id"
            self._segments[file] = cursor.lastrowid
        return self._segments[file], offset


def _trajectories(ref: GroupRef) -> Iterable[Any]:
    return (trajectory for episode in ref.episodes for trajectory in episode.trajectories)


def _episode_row(number: int, index: int, episode: EpisodeSummary) -> tuple[Any, ...]:
    newest = [t.newest_version for t in episode.trajectories if t.newest_version is not None]
    return (
        *(number, index, episode.id, episode.outcome, episode.reward, episode.error, episode.attempt),
        *(episode.seconds, episode.finished_at, len(episode.trajectories)),
        *(sum(t.num_tokens for t in episode.trajectories), episode.num_loss_tokens),
        *(episode.oldest_version, max(newest, default=None)),
    )


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, default=str)
