"""The run's record of what became of every group, episode and attempt, in SQLite.

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

from miles_core.durable.spool import find_groups

from . import queries
from .overview import verify
from .queries import Limits, OpenGroup, PendingRetry
from .schema import LedgerError, Transactions, connect

LEDGER = "ledger.db"


class Ledger(Transactions):
    """Writes `ledger.db`: the buffer calls it with each change of fate, the run with everything else that must last.

    After a write error (a full disk) every further call raises it: nothing is recorded behind a hole.
    """

    def __init__(self, db: sqlite3.Connection, *, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(db, path=path)
        self._clock = clock
        self._start: int | None = None
        self._changes_at_start: int | None = None
        """Rows that this process had changed when its newest start was made; None before its first."""
        self._numbers: dict[str, int] = self._read(queries.open_numbers)
        """Of open groups, by id."""
        self._segments: dict[str, int | None] = self._read(queries.segments)

    @classmethod
    def open(cls, path: Path, *, create: bool = False, clock: Callable[[], float] = time.time) -> Ledger:
        """The ledger at `path`; an older schema is brought up to date. The run's lock keeps other writers away.

        Raises:
            LedgerError: it is absent (without `create`), damaged, or written by a newer Miles.
        """
        return cls(connect(path, create=create), path=path, clock=clock)

    @property
    def is_new(self) -> bool:
        """Whether no run has begun in it."""
        return self._read(queries.last_start) is None

    def recover_spooled(self, trajectories: Path) -> int:
        """Take from the spool what the run stopped before recording; returns how many groups. Comes before `start`."""
        unfinished = self._read(queries.unfinished)
        since = min((at for _, _, at in unfinished.values()), default=0.0)
        return sum(self.recover(ref) for ref in find_groups(trajectories, unfinished, since=since))

    def recover(self, ref: GroupRef) -> bool:
        """Record a spooled group whose result is missing, on behalf of the start that ran it; False where none is."""
        missing = "SELECT attempt FROM groups WHERE number = ? AND finished_at IS NULL"
        row = self._read(lambda db: db.execute(missing, (self._numbers.get(ref.id),)).fetchone())
        if row is None or min((episode.attempt for episode in ref.episodes), default=0) < row[0]:
            return False
        if self._start is None and (last := self._read(queries.last_start)) is not None:
            self._start = last[0]
        self.finished(ref)
        return True

    def start(
        self, from_step: int | None = None, *, limits: Limits | None = None, info: Mapping[str, object] | None = None
    ) -> int:
        """Begin, or go on from committed step `from_step`; returns the number of this start.

        Groups of later steps go back to the buffer. Those that ran are issued again: `recover_spooled` comes before.
        Calling it twice in a row is the same as once.

        Args:
            from_step: None for a run that never began; 0 for the weights before the first step.
            limits: what `verify` checks the groups of this start against.
            info: plain data about this start: versions, host, what was resumed.
        """
        self._go_on(from_step, limits=limits or Limits(), info=info or {}, in_place=False)
        assert self._start is not None, "_go_on sets it"
        return self._start

    def rewind(self, to_step: int) -> int:
        """Go back to committed step `to_step` inside this process; returns how many groups the buffer gets back.

        A start like any other, under the limits of the last: what runs is issued again under its id. Right after
        `start(to_step)` it does nothing but answer.
        """
        return self._go_on(to_step, limits=None, info={}, in_place=self._changes_at_start is not None)

    def _go_on(self, from_step: int | None, *, limits: Limits | None, info: Mapping[str, Any], in_place: bool) -> int:
        """The one way back to a step, of a new process and of this one; returns how many groups were returned."""
        self.flush()
        newest, step, now = self._read(queries.last_version), from_step or 0, self._clock()
        last, last_step, returned, last_limits = self._read(queries.last_start) or (-1, None, 0, Limits())
        limits = limits or last_limits
        if self._changes_at_start == self._db.total_changes and (last_step or 0) == step:
            return returned
        if from_step is None and last >= 0:
            raise LedgerError(
                f"{self._path} belongs to a run that began before ({last + 1} starts). Resume it from a committed "
                "step, or start a run in another directory."
            )
        if step > newest:
            raise LedgerError(
                f"The run is to go on from step {step}, but {self._path} ends at step {newest}: the checkpoint "
                "and the ledger come from different copies of the run."
            )
        with self._writing() as db:
            row = (last + 1, from_step, now, in_place, limits.max_staleness, limits.credits, limits.retries)
            db.execute("INSERT INTO starts VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?)", (*row, json.dumps(info, default=str)))
            self._start = last + 1
            if last >= 0:
                db.execute(  # a checkpoint was complete, and the process died before it could say so
                    "UPDATE steps SET committed_at = ? WHERE dropped_start IS NULL AND version <= ? "
                    "AND committed_at IS NULL",
                    (now, step),
                )
                returned = self._return_groups(db, step)
                db.execute("UPDATE starts SET returned = ? WHERE start = ?", (returned, self._start))
                self._issue_again(db, 1 + last_limits.retries, step)
        self.flush()
        self._changes_at_start = self._db.total_changes
        return returned

    def _return_groups(self, db: sqlite3.Connection, step: int) -> int:
        """Drop the steps after `step`; what they trained is buffered again."""
        rows = queries.groups_of_steps_after(db, step)
        db.executemany("UPDATE groups SET fate = 'buffered', reason = '' WHERE number = ?", [(n,) for n, _ in rows])
        for number, group_id in rows:
            self._numbers[group_id] = number
            self._change(db, number, "returned", f"back to step {step}", step)
        db.executemany("UPDATE episodes SET is_masked = 0 WHERE number = ? AND is_masked", [(n,) for n, _ in rows])
        dropped = "dropped_start IS NULL AND version > ?"
        steps = f"SELECT step FROM steps WHERE {dropped}"
        db.execute(f"UPDATE step_groups SET is_live = 0 WHERE step IN ({steps})", (step,))
        db.execute(f"UPDATE steps SET dropped_start = ? WHERE {dropped}", (self._start, step))
        return len(rows)

    def _issue_again(self, db: sqlite3.Connection, attempts: int, step: int) -> None:
        """What ran when the run stopped runs again under its id, above the `attempts` that its worker may have made."""
        for number, _, _ in queries.unfinished(db).values():
            db.execute(
                "UPDATE groups SET issued_start = ?, issued_version = ?, attempt = attempt + ? WHERE number = ?",
                (self._start, step, attempts, number),
            )
            self._change(db, number, "reissued", "", step)

    def __call__(self, event: FateEvent) -> None:
        """One change of fate, from the buffer."""
        with self._recording() as db:
            if event.fate is Fate.IN_FLIGHT:
                self._issue(db, event)
                return
            number = self._number(db, event.group_id, f"become {event.fate}")
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
            number = self._number(db, ref.id, "finish")
            oldest, newest = _versions(ref.episodes)
            updated = db.execute(
                "UPDATE groups SET finished_at = ?, segment = ?, offset = ?, oldest_version = ?, newest_version = ? "
                "WHERE number = ? AND finished_at IS NULL",
                (self._clock(), *self._place(db, ref), oldest, newest, number),
            )
            if not updated.rowcount:
                raise LedgerError(f"Group {ref.id!r} has finished before; a group finishes once.")
            episodes: list[tuple[Any, ...]] = []
            attempts: list[tuple[Any, ...]] = []
            for index, e in enumerate(ref.episodes):
                result = (e.outcome, e.reward, e.error, e.attempt, e.seconds, e.finished_at)
                tokens = (len(e.trajectories), sum(t.num_tokens for t in e.trajectories), e.num_loss_tokens)
                episodes.append((number, index, e.id, *result, *tokens, e.oldest_version, _versions([e])[1]))
                attempts += [
                    (number, index, a.attempt, a.outcome, a.error, a.seconds, a.finished_at) for a in e.failed_attempts
                ]
            db.executemany("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)", episodes)
            db.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", attempts)

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

    def step(self, version: int, groups: Sequence[GroupRef], *, facts: Mapping[str, float] | None = None) -> None:
        """The engines hold weights `version`, trained on `groups`; before or after these become TRAINED."""
        with self._recording() as db:
            numbers = [self._number(db, group.id, "be in a step", may_have_ended=True) for group in groups]
            step = self._join_step(db, version, numbers)
            if facts:
                db.execute("UPDATE steps SET facts = ? WHERE step = ?", (json.dumps(facts), step))
            masked = [
                (number, episode)
                for number, group in zip(numbers, groups, strict=True)
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
            now = self._clock()
            db.execute(f"UPDATE steps SET committed_at = ? WHERE {live} <= ? AND committed_at IS NULL", (now, version))
            db.execute(f"UPDATE steps SET checkpoint = ? WHERE {live} = ?", (checkpoint, version))

        self._durably(mark)

    def event(self, kind: str, subject: str, text: str, *, version: int | None = None) -> None:
        """Something happened to a process of the run: an engine died, a worker came back, an alarm rang."""
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
        """
        row = (dataset, version, logged_version, score, reason, seconds, json.dumps(metrics or {}, default=str))
        with self._recording() as db:
            db.execute(
                "INSERT INTO evaluations (dataset, version, logged_version, score, reason, seconds, metrics, start, "
                "at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, self._start, self._clock()),
            )

    def open_groups(self) -> list[OpenGroup]:
        """Every group without a final fate, in the order of issue."""
        return self._read(queries.open_groups)

    def last_commit(self) -> int:
        """The newest step that a checkpoint has made durable; 0 before the first."""
        return self._read(queries.last_commit)

    def counts(self) -> FateCounts:
        return self._read(queries.counts)

    def next_group(self) -> int:
        """The number that the id of the next new group may carry."""
        number, last = self._read(queries.last_group)
        digits = re.search(r"\d+$", last)
        return max(number + 1, int(digits.group()) + 1 if digits else 0)

    def drawn(self) -> int:
        """Prompts drawn from the stream for all groups issued so far: where the stream goes on."""
        return self._read(queries.drawn)

    def scores(self) -> dict[int, float | None]:
        """Mean score of each evaluated version; None for one without."""
        return self._read(queries.scores)

    def pending_retries(self) -> list[PendingRetry]:
        """Prompts of discarded groups that are to run again, oldest first."""
        return self._read(queries.pending_retries)

    def verify(self) -> list[str]:
        """What contradicts what, as sentences; empty when every invariant is kept."""
        return self._read(verify)

    def require_sound(self) -> None:
        """Raise LedgerError with every invariant that is broken."""
        if problems := self.verify():
            raise LedgerError(f"{self._path} contradicts itself:\n" + "\n".join(f"- {line}" for line in problems))

    def _issue(self, db: sqlite3.Connection, event: FateEvent) -> None:
        number = queries.last_group(db)[0] + 1
        row = (number, event.group_id, event.prompt_id, event.fate, self._start, self._clock(), event.version)
        try:
            db.execute(
                "INSERT INTO groups (number, group_id, prompt_id, fate, reason, issued_start, issued_at, "
                "issued_version, attempt, drawn, retry_of, is_retry_due) VALUES (?, ?, ?, ?, '', ?, ?, ?, 0, ?, ?, 0)",
                (*row, event.drawn, event.retry_of),
            )
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"Group {event.group_id!r} was issued before; every issue needs a new id.") from error
        if event.retry_of is not None:
            db.execute("UPDATE groups SET is_retry_due = 0 WHERE group_id = ?", (event.retry_of,))
        self._numbers[event.group_id] = number
        self._change(db, number, "issued", "", event.version)

    def _join_step(self, db: sqlite3.Connection, version: int, numbers: Iterable[int]) -> int:
        """Put groups into the live step `version`, made if it is new; returns its row."""
        live = "SELECT step, start FROM steps WHERE version = ? AND dropped_start IS NULL"
        step, start = db.execute(live, (version,)).fetchone() or (None, self._start)
        if start != self._start:
            raise LedgerError(f"Step {version} was trained in start {start}; go back behind it with `rewind` first.")
        new: list[int] = []
        for number in numbers:
            trained_in = "SELECT version FROM step_groups JOIN steps USING (step) WHERE number = ? AND is_live"
            (other,) = db.execute(trained_in, (number,)).fetchone() or (None,)
            if other is None:
                new.append(number)
            elif other != version:
                raise LedgerError(
                    f"Group {queries.group_id(db, number)!r} was trained in step {other} and cannot enter step "
                    f"{version} as well."
                )
        if step is None:
            row = (version, self._start, self._clock())
            step = db.execute("INSERT INTO steps (version, start, at) VALUES (?, ?, ?)", row).lastrowid
            assert step is not None, "an INSERT has a row id"
        db.executemany("INSERT INTO step_groups VALUES (?, ?, 1)", [(step, number) for number in new])
        return step

    def _change(self, db: sqlite3.Connection, number: int, what: str, reason: str, version: int) -> None:
        db.execute(
            "INSERT INTO changes (number, what, reason, version, start, at) VALUES (?, ?, ?, ?, ?, ?)",
            (number, what, reason, version, self._start, self._clock()),
        )

    def _number(self, db: sqlite3.Connection, group_id: str, wanted: str, *, may_have_ended: bool = False) -> int:
        if group_id in self._numbers:
            return self._numbers[group_id]
        row = db.execute("SELECT number, fate FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        if row is None:
            raise LedgerError(f"Group {group_id!r} was never issued, so it cannot {wanted}.")
        if not may_have_ended:
            reason = "a group has one final fate"
            raise LedgerError(f"Group {group_id!r} is already {row[1]} and cannot {wanted}: {reason}.")
        return row[0]

    def _place(self, db: sqlite3.Connection, ref: GroupRef) -> tuple[int | None, int | None]:
        """Segment row and offset of a spooled group."""
        file, offset = ref.metadata.get("spool") or (None, None)
        if file is not None and file not in self._segments:
            self._segments[file] = db.execute("INSERT INTO segments (file) VALUES (?)", (file,)).lastrowid
        return (self._segments[file], offset) if file is not None else (None, None)

    @contextmanager
    def _recording(self) -> Generator[sqlite3.Connection]:
        if self._start is None:
            raise LedgerError("Nothing can be recorded before `start`.")
        with self._writing() as db:
            yield db


def _versions(episodes: Iterable[EpisodeSummary]) -> tuple[int | None, int | None]:
    """Oldest and newest version that sampled any of their tokens."""
    ends = [(t.oldest_version, t.newest_version) for episode in episodes for t in episode.trajectories]
    known = [version for pair in ends for version in pair if version is not None and version >= 0]
    return min(known, default=None), max(known, default=None)
