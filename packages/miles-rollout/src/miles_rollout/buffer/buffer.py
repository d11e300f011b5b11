"""The buffer itself: fates, credits and who waits for whom.

              acquire, issue          put                 take             release
    credit ──────────────────▶ IN_FLIGHT ──▶ BUFFERED ──────────▶ a batch ─────────▶ TRAINED
                                   │             │                   │
                                   ├─ filter ────┼── FILTERED        │   every final fate gives
                                   ├─ failures ──┼── FAILED          │   the credit back at once
                                   ├─ put_policy ┴── STALE ◀─ take_policy
                                   └─ forfeit, close ── ABORTED ◀────┘

A credit is held from issue to the final fate, and there are `(max_staleness + 1) * groups_per_step` of them: a
group is never issued more than `max_staleness` steps ahead of training. Credits alone do not bound the age of a
*straggler*: while it runs, its siblings in the queue could be trained and replaced many times. So a batch is held back
rather than let an open group become too old. With `stragglers = "overtake"` it is not: such a group meets the stale
policy when it arrives, and the longest episodes are lost, which biases training towards short ones.

Everything here runs on one event loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from miles_tito import GroupRef, Prompt

from miles_rollout.config import RolloutConfig
from miles_rollout.errors import BufferClosedError, BufferStateError, first_line
from miles_rollout.fates import Fate, FateBook, FateCounts, Observer
from miles_rollout.resume import Resume, Retry

from .admission import Admission, Discarded
from .batches import BatchRule
from .metrics import BufferMeter
from .queue import GroupQueue, QueuedGroup, RetryQueue
from .stop_rules import EmptyBatchGuard, FailureBudget


class GroupBuffer:
    """Credits out, finished groups in, batches of exactly `groups_per_step` groups out, oldest first.

    The producer acquires, issues and puts; the loop takes, sets the version and releases.
    """

    def __init__(self, config: RolloutConfig, *, observer: Observer | None = None, version: int = 0) -> None:
        """
        Args:
            config: limits, filter and policies.
            observer: called with every change of fate, before anything else sees it.
            version: weight version that the engines hold at the start.
        """
        self._max_staleness = config.max_staleness
        self._queue = GroupQueue(config.num_credits)
        self._retries = RetryQueue(config.group_retries)
        self._admission = Admission(config)
        self._batches = BatchRule(config)
        self._empty = EmptyBatchGuard(config)
        self._failures = FailureBudget(config)
        self._book = FateBook(observer=observer)
        self._meter = BufferMeter()
        self._changed = asyncio.Event()
        """Set, and replaced, at every change."""
        self._finished: str | None = None
        self._closed: BaseException | None = None
        self._version = version

    def restore(self, resume: Resume) -> None:
        """Go on with the groups of a run that stopped, before anything is issued; the observer knows them already.

        Those with a result hold credits, perhaps more than there are: then nothing is issued until enough came back.
        Admitted ones wait for a step again, the producer puts the others. Those without a result are issued again
        with `reissue` as credits come free, so that they are not older than they need to be when they are trained.
        """
        self._book.restore(
            resume.counts,
            ((g.id, g.prompt.id, Fate.BUFFERED if g.is_admitted else Fate.IN_FLIGHT) for g in resume.groups),
        )
        for order, group in enumerate(resume.groups, start=1 - len(resume.groups)):
            self._queue.add(
                QueuedGroup(
                    id=group.id,
                    order=resume.counts.issued + order,
                    prompt=group.prompt,
                    issued_version=group.issued_version,
                    ref=group.ref if group.is_admitted else None,
                    is_waiting=group.ref is None,
                    is_resumed=group.ref is not None,
                )
            )
        self._retries.extend(resume.retries)

    # ---- the producer's side

    async def acquire(self) -> None:
        """Wait for an admission credit; follow it with `issue`, or with `refund` if there is nothing to issue."""
        self._raise_if_closed()
        while self.credits_used >= self._queue.num_credits:
            await self._changed.wait()
            self._raise_if_closed()
        self._queue.reserved += 1

    def issue(self, group_id: str, prompt: Prompt, *, retry_of: str | None = None, drawn: int | None = None) -> None:
        """Bind an acquired credit to a new group, right before its episodes start.

        Args:
            retry_of: the discarded group whose prompt it runs again.
            drawn: prompts drawn from the stream so far, for the observer.
        """
        self._raise_if_closed()
        if not self._queue.reserved:
            raise BufferStateError(f"Group {group_id!r} is issued without a credit; `await acquire()` first.")
        order = self._book.issue(group_id, prompt_id=prompt.id, version=self._version, retry_of=retry_of, drawn=drawn)
        self._queue.reserved -= 1
        self._queue.add(QueuedGroup(id=group_id, order=order, prompt=prompt, issued_version=self._version))

    def reissue(self, group_id: str) -> None:
        """Bind an acquired credit to a group that a stopped run left running, right before its episodes run again."""
        self._raise_if_closed()
        group = self._queue[group_id]
        if not self._queue.reserved or not group.is_waiting:
            raise BufferStateError(
                f"Group {group_id!r} cannot be issued again: {self._queue.reserved} credits are acquired, and it "
                f"{'waits' if group.is_waiting else 'does not wait'} for one."
            )
        self._queue.reserved -= 1
        group.is_waiting = False
        group.issued_version = self._version

    def refund(self) -> None:
        """Give back a credit that was acquired but not used."""
        if not self._queue.reserved:
            raise BufferStateError("There is no unused credit to give back: every acquired one was issued or refunded.")
        self._queue.reserved -= 1
        self._notify()

    def next_retry(self) -> Retry | None:
        """The next prompt to run again, None when there is none."""
        return self._retries.next()

    def put(self, ref: GroupRef) -> Fate:
        """Admit a finished group, or discard it; the answer says which.

        Raises:
            BufferStateError: the group was never issued, was put before, or has a final fate.
            EmptyBatchesError: nothing but discarded groups for `max_empty_batches` batches.
            FailureBudgetError: too many episodes failed. Both also end every `take` and `acquire`.
        """
        self._raise_if_closed()
        self._book.require_open(ref.id, wanted=Fate.BUFFERED)
        group = self._queue[ref.id]
        if group.ref is not None:
            raise BufferStateError(f"Group {ref.id!r} was put before; a group is put once.")
        group.ref = ref
        self._meter.finished += 1
        with self._closing_on_error():
            decided = self._admission.decide(group, ref, version=self._version)
            if isinstance(decided, Discarded):
                self._discard_by_policy(group, decided)
                self._failures.record(ref.episodes)
                self._empty.discarded(ref, decided.reason)
            else:
                group.ref = decided
                self._book.advance(ref.id, Fate.BUFFERED, version=self._version)
                self._failures.record(ref.episodes)
                if group.staleness(self._version) <= self._max_staleness:
                    self._empty.admitted()
        self._notify()
        return decided.fate if isinstance(decided, Discarded) else Fate.BUFFERED

    def forfeit(self, group_id: str, fate: Fate, reason: str) -> None:
        """End an open group with any final fate but TRAINED, for example because its worker was lost."""
        if not fate.is_final or fate is Fate.TRAINED:
            raise BufferStateError(
                f"Group {group_id!r} cannot be forfeited as {fate}: use filtered, stale, failed or aborted; "
                "`release` marks groups as trained."
            )
        self._book.require_open(group_id, wanted=fate)
        self._discard(self._queue[group_id], fate, reason)
        self._notify()

    def finish(self, reason: str) -> None:
        """Say that nothing will be issued any more; `take` hands out full batches and then raises."""
        if self._finished is None:
            self._finished = reason
        self._notify()

    # ---- the trainer's side

    async def take(self) -> list[GroupRef]:
        """The next batch: `groups_per_step` groups, oldest first, none stale unless the policy keeps it.

        Raises:
            BufferClosedError: no full batch can come any more.
            BufferStateError: earlier batches were not released, so a full one cannot come.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        while (batch := self._next_batch()) is None:
            await self._changed.wait()
        for group in batch:
            group.is_taken = True
        self._meter.took(batch, version=self._version, wait_s=clock() - started)
        return [group.ref for group in batch if group.ref is not None]

    def set_version(self, version: int) -> None:
        """The engines hold weights `version` now; open groups age."""
        if version < self._version:
            raise BufferStateError(f"Weight version {version} comes after {self._version}; versions only grow.")
        self._version = version
        self._notify()

    def release(self, groups: Sequence[GroupRef | str]) -> None:
        """Give the credits of a taken batch back, once the weights trained on it are committed."""
        ids = [group if isinstance(group, str) else group.id for group in groups]
        for index, group_id in enumerate(ids):
            if group_id in ids[:index]:
                raise BufferStateError(f"Group {group_id!r} is in the list twice; a group is released once.")
            self._book.require_open(group_id, wanted=Fate.TRAINED)
            if not self._queue[group_id].is_taken:
                raise BufferStateError(f"Group {group_id!r} cannot be released: it was not taken.")
        for group_id in ids:
            self._retries.clear(self._queue.remove(group_id))
            self._book.advance(group_id, Fate.TRAINED, version=self._version)
        self._notify()

    # ---- both

    def close(self, error: BaseException | None = None) -> None:
        """End the buffer: open groups become aborted, and whoever waits gets `error`."""
        if self._closed is not None:
            return
        self._closed = error or BufferClosedError("The buffer is closed; the run has ended.")
        reason = "run ended" if error is None else f"{type(error).__name__}: {first_line(str(error))}"
        refused: Exception | None = None
        for group in self._queue:
            try:
                self._discard(group, Fate.ABORTED, reason)
            except Exception as problem:  # an observer that fails keeps no group from its fate and nobody asleep
                refused = refused or problem
        self._notify()
        if refused is not None and error is None:
            raise refused

    @property
    def version(self) -> int:
        return self._version

    @property
    def credits_used(self) -> int:
        return self._queue.credits_used

    def fate(self, group_id: str) -> Fate | None:
        """The present fate of a group, None if it was never issued."""
        return self._book.fate(group_id)

    def counts(self) -> FateCounts:
        return self._book.counts()

    def proof(self) -> str:
        """One line: what was issued is accounted for, nothing lost, nothing used twice."""
        return self.counts().proof()

    def metrics(self) -> dict[str, float]:
        """State now, and rates since the last call."""
        return {
            "buffer/queued": float(self._queue.num_admitted),
            "buffer/running": float(self._queue.num_running),
            "buffer/taken": float(self._queue.num_taken),
            "buffer/credits_used": float(self.credits_used),
            "buffer/credits": float(self._queue.num_credits),
            **self._meter.snapshot(),
        }

    # ---- helpers

    def _next_batch(self) -> list[QueuedGroup] | None:
        """A full batch, or None to wait for one; raises when none can come."""
        self._raise_if_closed()
        with self._closing_on_error():
            self._discard_stale()
        batch = self._batches.choose(self._queue, version=self._version)
        if batch is None:
            self._batches.require_possible(self._queue, finished=self._finished)
        return batch

    def _discard_stale(self) -> None:
        """Ask the take policy about every admitted group."""
        for group in sorted(self._queue.admitted(), key=lambda group: group.order):  # prompts come in their old order
            assert group.ref is not None, "an admitted group has a result"
            decided = self._admission.at_take.decide(group, group.ref, version=self._version)
            if isinstance(decided, Discarded):
                self._discard_by_policy(group, decided)
                self._empty.discarded(group.ref, decided.reason)
                self._notify()  # its credit is free
            else:
                group.ref = decided

    def _discard_by_policy(self, group: QueuedGroup, discarded: Discarded) -> None:
        """Where a policy wants it, the prompt runs again, a bounded number of times in a row."""
        will_retry = discarded.retry and self._retries.allows(group)
        self._discard(group, discarded.fate, discarded.reason, will_retry=will_retry)
        if will_retry:
            self._retries.add(group)
        else:
            self._retries.clear(group)

    def _discard(self, group: QueuedGroup, fate: Fate, reason: str, *, will_retry: bool = False) -> None:
        self._queue.remove(group.id)
        self._meter.discarded[reason if fate is not Fate.ABORTED else "aborted"] += 1
        self._book.advance(group.id, fate, reason=reason, version=self._version, will_retry=will_retry)

    @contextmanager
    def _closing_on_error(self) -> Generator[None]:
        """Whatever breaks inside, nobody may go on waiting for this buffer."""
        try:
            yield
        except Exception as error:
            self.close(error)
            raise

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _notify(self) -> None:
        """Wake whoever waits for a credit or a batch."""
        self._changed.set()
        self._changed = asyncio.Event()
