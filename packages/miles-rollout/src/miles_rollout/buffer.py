"""The bounded, staleness-aware buffer between rollout and training.

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
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from miles_tito import GroupRef, Prompt
from miles_tito.shared.settings import SettingError

from .config import RolloutConfig
from .dispatch import FAILED_BECAUSE
from .errors import BufferClosedError, BufferStateError
from .fates import Fate, FateBook, FateCounts, Observer
from .filters import load_filter
from .guards import ENGINE_BEHIND, EmptyBatchGuard, FailureBudget, first_line
from .meters import BufferMeter
from .policies import (
    MASKED_EPISODES,
    StalePolicy,
    Verdict,
    load_failure_policy,
    load_stale_policy,
    rest_can_wait,
    stale_episodes,
)
from .resume import Resume, Retry


@dataclass(slots=True, kw_only=True)
class _Open:
    """A group that holds a credit."""

    id: str
    order: int
    prompt: Prompt
    issued_version: int
    ref: GroupRef | None = None
    is_waiting: bool = False
    """Left by a run that stopped, without a result: holds no credit until it is issued again."""
    is_resumed: bool = False
    """Left by a run that stopped, with a result: what makes it too old is the stop."""
    is_taken: bool = False

    @property
    def oldest_version(self) -> int:
        """Of its oldest token; of its issue where the engine named no version, since no token is older than that."""
        oldest = None if self.ref is None else self.ref.oldest_version
        if self.ref is None or oldest is None:
            return self.issued_version
        return oldest if self.ref.is_versioned else min(oldest, self.issued_version)


class GroupBuffer:
    """Credits out, finished groups in, batches of exactly `groups_per_step` groups out, oldest first."""

    def __init__(self, config: RolloutConfig, *, observer: Observer | None = None, version: int = 0) -> None:
        """
        Args:
            config: limits, filter and policies.
            observer: called with every change of fate, before anything else sees it.
            version: weight version that the engines hold at the start.
        """
        self._config = config
        self._filter = load_filter(config.filter)
        self._failure_policy = load_failure_policy(config.failure_policy)
        self._put_policy = load_stale_policy(config.put_policy)
        self._take_policy = load_stale_policy(config.take_policy)
        self._empty = EmptyBatchGuard(
            max_empty_batches=config.max_empty_batches, groups_per_step=config.groups_per_step
        )
        self._failures = FailureBudget(
            max_failure_rate=config.max_failure_rate,
            window=config.failure_window,
            min_failures=config.min_failures,
        )
        self._book = FateBook(observer=observer)
        self._meter = BufferMeter()
        self._open: dict[str, _Open] = {}
        self._reserved = 0
        """Credits acquired for groups that are not issued yet."""
        self._retries: deque[Retry] = deque()
        self._times_again: Counter[str] = Counter()
        """Times in a row that each prompt, by id, was to run again."""
        self._waiters: list[asyncio.Future[None]] = []
        self._finished: str | None = None
        self._closed: BaseException | None = None
        self._version = version

    def restore(self, resume: Resume) -> None:
        """Take up the groups of a run that stopped, before anything is issued; the observer knows them already.

        Those with a result hold credits, perhaps more than there are: then nothing is issued until enough came back.
        Admitted ones wait for a step again, the producer puts the others. Those without a result are issued again
        with `reissue` as credits come free, so that they are not older than they need to be when they are trained.
        """
        self._book.restore(
            resume.counts,
            ((g.id, g.prompt.id, Fate.BUFFERED if g.is_admitted else Fate.IN_FLIGHT) for g in resume.groups),
        )
        for order, group in enumerate(resume.groups, start=1 - len(resume.groups)):
            self._open[group.id] = _Open(
                id=group.id,
                order=resume.counts.issued + order,
                prompt=group.prompt,
                issued_version=group.issued_version,
                ref=group.ref if group.is_admitted else None,
                is_waiting=group.ref is None,
                is_resumed=group.ref is not None,
            )
        self._retries.extend(resume.retries)

    # ---- the producer's side

    async def acquire(self) -> None:
        """Wait for an admission credit; follow it with `issue`, or with `refund` if there is nothing to issue."""
        self._raise_if_closed()
        while self.credits_used >= self._config.num_credits:
            await self._change()
            self._raise_if_closed()
        self._reserved += 1

    def issue(self, group_id: str, prompt: Prompt, *, retry_of: str | None = None, drawn: int | None = None) -> None:
        """Bind an acquired credit to a new group, right before its episodes start.

        Args:
            retry_of: the stale group whose prompt it runs again.
            drawn: prompts drawn from the stream so far, for the observer.
        """
        self._raise_if_closed()
        if not self._reserved:
            raise BufferStateError(f"Group {group_id!r} is issued without a credit; `await acquire()` first.")
        self._book.issue(group_id, prompt_id=prompt.id, version=self._version, retry_of=retry_of, drawn=drawn)
        self._reserved -= 1
        self._open[group_id] = _Open(
            id=group_id, order=self._book.counts().issued, prompt=prompt, issued_version=self._version
        )

    def reissue(self, group_id: str) -> None:
        """Bind an acquired credit to a group that a stopped run left running, right before its episodes run again."""
        self._raise_if_closed()
        group = self._open[group_id]
        if not self._reserved or not group.is_waiting:
            raise BufferStateError(
                f"Group {group_id!r} cannot be issued again: {self._reserved} credits are acquired, and it "
                f"{'waits' if group.is_waiting else 'does not wait'} for one."
            )
        self._reserved -= 1
        group.is_waiting = False
        group.issued_version = self._version

    def refund(self) -> None:
        """Give back a credit that was acquired but not used."""
        if not self._reserved:
            raise BufferStateError("There is no unused credit to give back: every acquired one was issued or refunded.")
        self._reserved -= 1
        self._notify()

    def next_retry(self) -> Retry | None:
        """The next prompt to run again, None when there is none."""
        return self._retries.popleft() if self._retries else None

    def put(self, ref: GroupRef) -> Fate:
        """Admit a finished group, or discard it; the answer says which.

        Raises:
            BufferStateError: the group was never issued, was put before, or has a final fate.
            EmptyBatchesError: nothing but discarded groups for `max_empty_batches` batches.
            FailureBudgetError: too many episodes failed. Both also end every `take` and `acquire`.
        """
        self._raise_if_closed()
        self._book.require_open(ref.id, wanted=Fate.BUFFERED)
        group = self._open[ref.id]
        if group.ref is not None:
            raise BufferStateError(f"Group {ref.id!r} was put before; a group is put once.")
        group.ref = ref
        self._meter.finished += 1
        with self._closing_on_error():
            fate, reason = self._admit(group, ref)
            self._failures.record(ref.episodes)
            self._count_discard(group, ref, fate, reason)
        self._notify()
        return fate

    def forfeit(self, group_id: str, fate: Fate, reason: str) -> None:
        """End an open group with any final fate but TRAINED, for example because its worker was lost."""
        if not fate.is_final or fate is Fate.TRAINED:
            raise BufferStateError(
                f"Group {group_id!r} cannot be forfeited as {fate}: use filtered, stale, failed or aborted; "
                "`release` marks groups as trained."
            )
        self._book.require_open(group_id, wanted=fate)
        self._discard(self._open[group_id], fate, reason)
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
        started = asyncio.get_running_loop().time()
        while (batch := self._next_batch()) is None:
            await self._change()
        for group in batch:
            group.is_taken = True
        self._meter.took(
            staleness=[self._trained_staleness(group) for group in batch],
            num_masked=sum(len(group.ref.metadata.get(MASKED_EPISODES, ())) for group in batch if group.ref),
            wait_s=asyncio.get_running_loop().time() - started,
        )
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
            if not self._open[group_id].is_taken:
                raise BufferStateError(f"Group {group_id!r} cannot be released: it was not taken.")
        for group_id in ids:
            self._times_again.pop(self._open.pop(group_id).prompt.id, None)
            self._book.advance(group_id, Fate.TRAINED, reason="", version=self._version)
        self._notify()

    # ---- both

    def close(self, error: BaseException | None = None) -> None:
        """End the buffer: open groups become aborted, and whoever waits gets `error`."""
        if self._closed is not None:
            return
        self._closed = error or BufferClosedError("The buffer is closed; the run has ended.")
        reason = "run ended" if error is None else f"{type(error).__name__}: {first_line(str(error))}"
        refused: Exception | None = None
        for group in list(self._open.values()):
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
        return self._reserved + sum(not group.is_waiting for group in self._open.values())

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
        queued = sum(group.ref is not None and not group.is_taken for group in self._open.values())
        taken = sum(group.is_taken for group in self._open.values())
        return {
            "buffer/queued": float(queued),
            "buffer/running": float(self._num_running()),
            "buffer/taken": float(taken),
            "buffer/credits_used": float(self.credits_used),
            "buffer/credits": float(self._config.num_credits),
            **self._meter.snapshot(),
        }

    # ---- helpers

    def _admit(self, group: _Open, ref: GroupRef) -> tuple[Fate, str]:
        """Give a group that has just finished its next fate; returns it with its reason."""
        if (reason := self._failed(group, ref)) is not None:
            return Fate.FAILED, reason
        reason = self._filter(ref)
        if reason is not None:
            self._times_again.pop(group.prompt.id, None)
            self._discard(group, Fate.FILTERED, reason)
            return Fate.FILTERED, reason
        if self._apply(self._put_policy, group, ref) in _DISCARD:
            return Fate.STALE, self._stale_reason(group)
        self._book.advance(ref.id, Fate.BUFFERED, reason="", version=self._version)
        return Fate.BUFFERED, ""

    def _failed(self, group: _Open, ref: GroupRef) -> str | None:
        """Ask what becomes of a group with failed episodes; the reason if it was discarded."""
        required = self._config.required_rewards
        verdict = Verdict.KEEP
        if ref.num_rewarded < len(ref.episodes):
            verdict = self._failure_policy(ref, required_rewards=required)
        if verdict is Verdict.MASK:
            raise SettingError(
                f"`failure_policy` = {self._config.failure_policy!r} answered 'mask' for group {ref.id}; failed "
                "episodes are never trained, so it answers keep, drop or retry."
            )
        if verdict is Verdict.KEEP and ref.num_rewarded >= required:
            return None
        reason = str(ref.metadata.get(FAILED_BECAUSE, "too_few_rewards"))
        if ref.num_rewarded >= required:
            reason = "incomplete"
        self._give_up(group, Fate.FAILED, reason, retry=verdict is Verdict.RETRY)
        return reason

    def _give_up(self, group: _Open, fate: Fate, reason: str, *, retry: bool) -> None:
        """Discard a group; where a policy wants it, its prompt runs again, a bounded number of times in a row."""
        prompt_id = group.prompt.id
        will_retry = retry and (group.is_resumed or self._times_again[prompt_id] < self._config.group_retries)
        self._discard(group, fate, reason, will_retry=will_retry)
        if will_retry:
            self._times_again[prompt_id] += 1
            self._retries.append(Retry(prompt=group.prompt, retry_of=group.id))
        else:
            self._times_again.pop(prompt_id, None)

    def _apply(self, policy: StalePolicy, group: _Open, ref: GroupRef) -> Verdict:
        """Ask a policy about one group, and do what it says."""
        staleness, limit = self._staleness(group), self._config.max_staleness
        verdict = policy(ref, staleness=staleness, max_staleness=limit)
        if verdict is Verdict.DROP and group.is_resumed:
            verdict = Verdict.RETRY  # a stop made it old; what is learned must not depend on stops
        match verdict:
            case Verdict.KEEP:
                pass
            case Verdict.MASK:
                masked = stale_episodes(ref, staleness=staleness, max_staleness=limit)
                group.ref = replace(ref, metadata={**ref.metadata, MASKED_EPISODES: masked})
            case Verdict.DROP | Verdict.RETRY:
                self._give_up(group, Fate.STALE, self._stale_reason(group), retry=verdict is Verdict.RETRY)
        return verdict

    def _next_batch(self) -> list[_Open] | None:
        """A full batch, or None to wait for one; raises when waiting is in vain."""
        self._raise_if_closed()
        with self._closing_on_error():
            self._discard_stale()
        batch = self._queue()[: self._config.groups_per_step]
        if len(batch) == self._config.groups_per_step and self._may_leave(batch):
            return batch
        self._raise_if_in_vain(len(batch))
        return None

    def _discard_stale(self) -> None:
        for group in sorted(self._queue(), key=lambda group: group.order):  # prompts come again in their old order
            ref = group.ref
            if ref is not None and self._apply(self._take_policy, group, ref) in _DISCARD:
                self._count_discard(group, ref, Fate.STALE, self._stale_reason(group))
                self._notify()  # its credit is free

    def _stale_reason(self, group: _Open) -> str:
        """A group grows old by itself, or its engine sampled with weights older than the group's issue."""
        if group.is_resumed:
            return "resumed_too_late"
        return "stale" if self._version - group.issued_version > self._config.max_staleness else ENGINE_BEHIND

    def _count_discard(self, group: _Open, ref: GroupRef, fate: Fate, reason: str) -> None:
        """Tell the guard. Age alone does not count: versions grow only where something is trained."""
        if fate is Fate.BUFFERED:
            if self._staleness(group) <= self._config.max_staleness:
                self._empty.admitted()
        elif reason not in ("stale", "resumed_too_late"):
            self._empty.discarded(ref, reason)

    def _queue(self) -> list[_Open]:
        """Admitted groups that are not taken, oldest first."""
        queued = [group for group in self._open.values() if group.ref is not None and not group.is_taken]
        return sorted(queued, key=lambda group: (group.oldest_version, group.order))

    def _may_leave(self, batch: list[_Open]) -> bool:
        """Whether a step on `batch` leaves no other open group too old to be trained."""
        if self._config.stragglers == "overtake" or not self._num_running():
            return True
        chosen = {group.id for group in batch}
        rest = [
            group.oldest_version
            for group in self._open.values()
            if not group.is_taken and not group.is_waiting and group.id not in chosen
        ]
        return rest_can_wait(
            rest,
            version=self._version,
            max_staleness=self._config.max_staleness,
            groups_per_step=self._config.groups_per_step,
        )

    def _raise_if_in_vain(self, queued: int) -> None:
        wanted = self._config.groups_per_step
        if self._finished is not None and not self._num_running() and queued < wanted:
            raise BufferClosedError(
                f"A batch needs {wanted} groups, {queued} are ready and none is running: {self._finished}."
            )
        taken = sum(group.is_taken for group in self._open.values())
        if self._config.num_credits - taken < wanted:
            raise BufferStateError(
                f"{taken} taken groups hold {taken} of {self._config.num_credits} credits, so a batch of {wanted} "
                "cannot come. Call `release` after each step, or raise `max_staleness`."
            )

    def _num_running(self) -> int:
        return sum(group.ref is None and not group.is_waiting for group in self._open.values())

    def _staleness(self, group: _Open) -> int:
        return max(0, self._version - group.oldest_version)

    def _trained_staleness(self, group: _Open) -> int:
        """Of the oldest token that will be trained: masked episodes do not count."""
        masked = group.ref.metadata.get(MASKED_EPISODES, ()) if group.ref is not None else ()
        if group.ref is None or not masked:
            return self._staleness(group)
        fresh = [e.oldest_version for e in group.ref.episodes if e.id not in masked]
        return max((self._version - version for version in fresh if version is not None), default=0)

    def _discard(self, group: _Open, fate: Fate, reason: str, *, will_retry: bool = False) -> None:
        del self._open[group.id]
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

    async def _change(self) -> None:
        """Wait until anything changed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


_DISCARD = (Verdict.DROP, Verdict.RETRY)
