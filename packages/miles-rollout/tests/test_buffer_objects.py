"""The objects that the buffer is made of, each by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from miles_rollout import BufferClosedError, BufferStateError, Fate, Verdict
from miles_rollout.buffer.admission import Admission, AgeLimit, Discarded
from miles_rollout.buffer.batches import BatchRule
from miles_rollout.buffer.queue import GroupQueue, QueuedGroup, RetryQueue
from miles_rollout.buffer.stop_rules import EmptyBatchGuard
from miles_tito import GroupRef, Prompt
from scripted_rollout import make_config, make_ref


def group(group_id: str, order: int = 0, *, ref: GroupRef | None = None, **fields: bool) -> QueuedGroup:
    return QueuedGroup(id=group_id, order=order, prompt=Prompt(id="p"), issued_version=0, ref=ref, **fields)


def queue_of(*groups: QueuedGroup, num_credits: int = 4) -> GroupQueue:
    queue = GroupQueue(num_credits)
    for one in groups:
        queue.add(one)
    return queue


def test_a_group_that_waits_to_be_issued_again_holds_no_credit() -> None:
    queue = queue_of(group("a"), group("b", is_waiting=True), group("c", ref=make_ref("c")))
    queue.reserved = 1
    assert (queue.credits_used, queue.num_running, [g.id for g in queue.admitted()]) == (3, 1, ["c"])


def test_a_prompt_is_retried_so_often_in_a_row_and_a_resumed_one_always() -> None:
    retries = RetryQueue(group_retries=1)
    one = group("a")
    assert retries.allows(one)
    retries.add(one)
    assert not retries.allows(one)
    assert retries.allows(group("a", is_resumed=True))
    retries.clear(one)
    assert retries.allows(one)
    assert [retries.next(), retries.next()][1] is None


@pytest.mark.parametrize(("policy", "retry"), [(Verdict.DROP, False), (Verdict.RETRY, True), ("drop", False)])
def test_an_age_limit_says_why_a_group_is_discarded(policy: Verdict, retry: bool) -> None:
    limit = AgeLimit(lambda ref, *, staleness, max_staleness: policy, max_staleness=1)
    ref = make_ref("a")
    assert limit.decide(group("a", ref=ref), ref, version=5) == Discarded(fate=Fate.STALE, reason="stale", retry=retry)
    assert limit.decide(group("a", ref=ref), ref, version=1) == Discarded(
        fate=Fate.STALE, reason="engine_behind", retry=retry
    )
    resumed = limit.decide(group("a", ref=ref, is_resumed=True), ref, version=5)
    assert resumed == Discarded(fate=Fate.STALE, reason="resumed_too_late", retry=True)


def test_what_a_policy_may_not_answer_is_refused() -> None:
    limit = AgeLimit(lambda ref, *, staleness, max_staleness: None, max_staleness=1)  # pyright: ignore
    with pytest.raises(ValueError, match="None is not a valid Verdict"):
        limit.decide(group("a"), make_ref("a"), version=0)


def test_failures_come_before_the_filter_and_the_filter_before_the_age() -> None:
    admission = Admission(make_config(group_size=2, max_staleness=0, put_policy="drop"))

    def fate(rewards: list[float | None]) -> Fate | None:
        decided = admission.decide(group("a"), make_ref("a", rewards), version=9)
        return decided.fate if isinstance(decided, Discarded) else None

    assert [fate([None, 1.0]), fate([1.0, 1.0]), fate([0.0, 1.0])] == [Fate.FAILED, Fate.FILTERED, Fate.STALE]
    assert admission.decide(group("a"), fine := make_ref("a"), version=0) is fine


def test_a_batch_waits_for_the_group_that_it_would_make_too_old() -> None:
    ready = [group(name, order, ref=make_ref(name)) for order, name in enumerate("ab")]
    for stragglers, chosen in (("wait", None), ("overtake", ["a", "b"])):
        rule = BatchRule(make_config(max_staleness=0, stragglers=stragglers))
        batch = rule.choose(queue_of(*ready, group("running", 2)), version=0)
        assert (batch and [g.id for g in batch]) == chosen
        alone = rule.choose(queue_of(*ready), version=0)
        assert alone is not None
        assert [g.id for g in alone] == ["a", "b"]


@pytest.mark.parametrize(
    ("queue", "finished", "error"),
    [
        (lambda: queue_of(group("a", ref=make_ref("a"))), "the prompts ended", BufferClosedError),
        (lambda: queue_of(*(group(n, ref=make_ref(n), is_taken=True) for n in "abc")), None, BufferStateError),
        (lambda: queue_of(group("a")), "the prompts ended", None),
    ],
)
def test_waiting_for_a_batch_that_cannot_come_is_an_error(
    queue: Callable[[], GroupQueue], finished: str | None, error: type[Exception] | None
) -> None:
    rule = BatchRule(make_config())
    if error is None:
        rule.require_possible(queue(), finished=finished)
        return
    with pytest.raises(error):
        rule.require_possible(queue(), finished=finished)


def test_groups_that_only_grew_old_do_not_count_as_empty_batches() -> None:
    guard = EmptyBatchGuard(make_config(max_empty_batches=1))
    for _ in range(9):
        guard.discarded(make_ref("a"), "stale")
        guard.discarded(make_ref("a"), "resumed_too_late")
