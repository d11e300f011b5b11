"""One group at a time through the buffer: credits, verdicts, batches, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from miles_rollout import (
    MASKED_EPISODES,
    BufferClosedError,
    BufferStateError,
    EmptyBatchesError,
    FailureBudgetError,
    Fate,
    FateEvent,
    GroupBuffer,
    RolloutConfigError,
)
from miles_tito import Prompt
from scripted_rollout import make_config, make_fan_out_ref, make_ref, now, run_virtual


async def issue(buffer: GroupBuffer, *group_ids: str) -> None:
    for group_id in group_ids:
        await buffer.acquire()
        buffer.issue(group_id, Prompt(id=f"p-{group_id}"))


async def admitted(buffer: GroupBuffer, *group_ids: str, **fields: Any) -> None:
    """Issue groups and put them with spread rewards."""
    for group_id in group_ids:
        await issue(buffer, group_id)
        buffer.put(make_ref(group_id, **fields))


@pytest.mark.parametrize(("staleness", "num_credits"), [(0, 2), (1, 4), (3, 8)])
def test_at_most_staleness_plus_one_batches_hold_credits(staleness: int, num_credits: int) -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=staleness))
        await issue(buffer, *(f"g{i}" for i in range(num_credits)))
        assert buffer.credits_used == num_credits
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.acquire(), timeout=1000)

    run_virtual(main())


def test_credits_come_back_only_when_the_step_is_committed() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0))
        await admitted(buffer, "a", "b")
        batch = await buffer.take()
        waiting = asyncio.create_task(buffer.acquire())
        buffer.set_version(1)
        await asyncio.sleep(0)
        assert not waiting.done(), "the step is not released yet"
        buffer.release(batch)
        await waiting
        assert buffer.fate("a") is Fate.TRAINED

    run_virtual(main())


def test_an_unused_credit_that_is_refunded_goes_to_whoever_waits() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=0))
        await buffer.acquire()
        waiting = asyncio.create_task(buffer.acquire())
        await asyncio.sleep(0)
        buffer.refund()
        await waiting
        assert buffer.credits_used == 1

    run_virtual(main())


def test_a_filtered_group_gives_its_credit_back_at_once() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0))
        await issue(buffer, "a", "b")
        waiting = asyncio.create_task(buffer.acquire())
        await asyncio.sleep(0)
        assert buffer.put(make_ref("a", [1.0, 1.0])) is Fate.FILTERED
        await waiting
        assert buffer.counts().filtered == 1

    run_virtual(main())


def test_s07_a_batch_has_its_full_size_however_many_groups_are_filtered() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=4, max_staleness=1))
        for i in range(8):
            await issue(buffer, f"g{i}")
            buffer.put(make_ref(f"g{i}", [0.0, 1.0] if i % 2 else [1.0, 1.0]))
        assert len(await buffer.take()) == 4
        metrics = buffer.metrics()
        assert metrics["buffer/discard_rate"] == 0.5
        assert metrics["buffer/discarded/zero_spread"] == 4

    run_virtual(main())


def test_a_group_with_too_few_rewards_has_failed_and_is_not_filtered() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(group_size=3))
        await issue(buffer, "a", "b")
        assert buffer.put(make_ref("a", [1.0, None, None])) is Fate.FAILED
        assert buffer.put(make_ref("b", [1.0, None, 0.0])) is Fate.BUFFERED

    run_virtual(main())


def test_the_oldest_groups_are_taken_first() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=3))
        await issue(buffer, "a", "b", "c", "d")
        for group_id, version in (("d", 2), ("b", 1), ("c", 0), ("a", 1)):
            buffer.put(make_ref(group_id, versions=version))
        assert [ref.id for ref in await buffer.take()] == ["c", "a"]
        assert [ref.id for ref in await buffer.take()] == ["b", "d"]

    run_virtual(main())


def test_staleness_counts_from_the_oldest_token_of_any_sibling() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=1, put_policy="drop"), version=5)
        await issue(buffer, "a", "b")
        assert buffer.put(make_ref("a", versions=[5, 4])) is Fate.BUFFERED
        assert buffer.put(make_ref("b", versions=[5, 3])) is Fate.STALE

    run_virtual(main())


def test_a_group_whose_engine_named_no_version_is_as_old_as_its_issue() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=1), version=7)
        await admitted(buffer, "a", "b", versions=-1)
        await buffer.take()
        assert buffer.metrics()["buffer/staleness_max"] == 0

    run_virtual(main())


def test_a_group_that_ages_in_the_queue_is_dropped_when_a_batch_is_made() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=1))
        await admitted(buffer, "old")
        buffer.set_version(2)
        await admitted(buffer, "new1", "new2", versions=2)
        assert [ref.id for ref in await buffer.take()] == ["new1", "new2"]
        assert buffer.fate("old") is Fate.STALE
        assert buffer.next_retry() is None

    run_virtual(main())


def test_retry_runs_the_prompt_of_a_stale_group_again() -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        buffer = GroupBuffer(make_config(max_staleness=0, put_policy="retry"), observer=events.append)
        await issue(buffer, "a")
        buffer.set_version(1)
        assert buffer.put(make_ref("a")) is Fate.STALE
        assert events[-1].will_retry
        retry = buffer.next_retry()
        assert retry is not None
        assert (retry.prompt.id, retry.retry_of) == ("p-a", "a")
        await buffer.acquire()
        buffer.issue("b", retry.prompt, retry_of=retry.retry_of)
        assert (events[-1].fate, events[-1].retry_of) == (Fate.IN_FLIGHT, "a")

    run_virtual(main())


def test_a_prompt_that_is_too_old_every_time_runs_again_so_often_and_no_more() -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        config = make_config(groups_per_step=1, max_staleness=0, put_policy="retry", group_retries=2)
        buffer = GroupBuffer(config, observer=events.append)
        for number in range(3):
            await buffer.acquire()
            buffer.issue(f"g{number}", Prompt(id="slow"))
            buffer.set_version(number + 1)
            assert buffer.put(make_ref(f"g{number}", versions=number)) is Fate.STALE
            assert (buffer.next_retry() is None) == (number == 2)
        assert [event.will_retry for event in events if event.fate is Fate.STALE] == [True, True, False]

    run_virtual(main())


@pytest.mark.parametrize(
    ("policy", "rewards", "fate", "reason", "again"),
    [
        ("keep", [1.0, None, 0.0], Fate.BUFFERED, "", False),
        ("keep", [1.0, None, None], Fate.FAILED, "too_few_rewards", False),
        ("retry", [1.0, None, 0.0], Fate.BUFFERED, "", False),
        ("retry", [1.0, None, None], Fate.FAILED, "too_few_rewards", True),
        ("drop", [1.0, None, 0.0], Fate.FAILED, "incomplete", False),
        ("drop", [1.0, 0.5, 0.0], Fate.BUFFERED, "", False),
        ("scripted_rollout:always_keep", [1.0, None, None], Fate.FAILED, "too_few_rewards", False),
        ("scripted_rollout:always_retry", [1.0, None, 0.0], Fate.FAILED, "incomplete", True),
    ],
)
def test_r05_the_failure_policy_decides_what_becomes_of_the_siblings(
    policy: str, rewards: list[float | None], fate: Fate, reason: str, again: bool
) -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        buffer = GroupBuffer(make_config(group_size=3, failure_policy=policy), observer=events.append)
        await issue(buffer, "a")
        assert buffer.put(make_ref("a", rewards)) is fate
        assert (events[-1].reason, events[-1].will_retry) == (reason, again)
        assert (buffer.next_retry() is not None) == again
        assert buffer.metrics().get(f"buffer/discarded/{reason}", 0) == (fate is Fate.FAILED)

    run_virtual(main())


def test_a_prompt_whose_group_fails_every_time_is_given_up_and_its_retries_start_anew_after_a_success() -> None:
    async def main() -> None:
        buffer = GroupBuffer(
            make_config(groups_per_step=1, max_staleness=2, failure_policy="retry", group_retries=1, max_failure_rate=1)
        )
        fates: list[bool] = []
        for number, rewards in enumerate([[None, None], [0.0, 1.0], [None, None], [None, None], [None, None]]):
            await buffer.acquire()
            buffer.issue(f"g{number}", Prompt(id="p"))
            if buffer.put(make_ref(f"g{number}", rewards)) is Fate.BUFFERED:
                buffer.release(await buffer.take())
            fates.append(buffer.next_retry() is not None)
        assert fates == [True, False, True, False, True]

    run_virtual(main())


def test_a_failure_policy_that_masks_is_told_that_it_cannot() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(failure_policy="scripted_rollout:always_mask"))
        await issue(buffer, "a")
        with pytest.raises(RolloutConfigError, match="answered 'mask' for group a"):
            buffer.put(make_ref("a", [1.0, None]))

    run_virtual(main())


def test_keep_trains_a_group_of_any_age() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0, put_policy="keep", take_policy="keep"))
        await issue(buffer, "a", "b")
        buffer.set_version(9)
        for group_id in "ab":
            assert buffer.put(make_ref(group_id)) is Fate.BUFFERED
        assert len(await buffer.take()) == 2
        assert buffer.metrics()["buffer/staleness_max"] == 9

    run_virtual(main())


def test_s02_mask_keeps_the_fresh_siblings_of_a_stale_episode() -> None:
    async def main() -> None:
        config = make_config(group_size=4, groups_per_step=1, max_staleness=1)  # mask is the default
        buffer = GroupBuffer(config, version=5)
        await issue(buffer, "a", "b")
        assert buffer.put(make_ref("a", [0.0, 1.0, 1.0, 1.0], versions=[2, 5, 5, 4])) is Fate.BUFFERED
        (ref,) = await buffer.take()
        assert ref.metadata[MASKED_EPISODES] == ("a/0",)
        assert ref.rewards == (0.0, 1.0, 1.0, 1.0)
        metrics = buffer.metrics()
        assert (metrics["buffer/staleness_max"], metrics["buffer/masked_episodes"]) == (1, 1)
        assert buffer.put(make_ref("b", [0.0, 1.0, 1.0, 1.0], versions=2)) is Fate.STALE

    run_virtual(main())


def test_s03_a_reward_that_is_always_zero_stops_the_run_with_advice() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_empty_batches=3))
        taking = asyncio.create_task(buffer.take())
        for i in range(5):
            await issue(buffer, f"g{i}")
            buffer.put(make_ref(f"g{i}", [0.0, 0.0]))
        await issue(buffer, "last")
        with pytest.raises(EmptyBatchesError, match=r"6 groups \(3 batches' worth\).*6 zero_spread.*known right"):
            buffer.put(make_ref("last", [0.0, 0.0]))
        with pytest.raises(EmptyBatchesError):
            await taking
        assert buffer.counts().filtered == 6

    run_virtual(main())


def test_s03_one_useful_group_starts_the_count_of_empty_batches_again() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_empty_batches=1, max_staleness=9))
        for i in range(10):
            await issue(buffer, f"g{i}")
            buffer.put(make_ref(f"g{i}", [0.0, float(i % 2)]))
        assert buffer.counts().filtered == 5

    run_virtual(main())


def test_r05_one_failed_episode_is_data_and_the_run_goes_on() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(group_size=4, max_failure_rate=0.3, failure_window=16, min_failures=2))
        await admitted(buffer, "a", "b", rewards=[0.0, 1.0, 1.0, None])
        assert [ref.rewards.count(None) for ref in await buffer.take()] == [1, 1]

    run_virtual(main())


def test_r05_failures_above_the_budget_stop_the_run_and_name_the_top_cause() -> None:
    async def main() -> None:
        buffer = GroupBuffer(
            make_config(group_size=4, max_staleness=9, max_failure_rate=0.4, failure_window=8, min_failures=4)
        )
        await admitted(buffer, "a", rewards=[0.0, 1.0, None, None], error="sandbox 17 is out of disk")
        await issue(buffer, "b")
        with pytest.raises(
            FailureBudgetError, match=r"4 of the last 8 episodes failed \(50%\).*4 times\): infra_abort: sandbox 17"
        ):
            buffer.put(make_ref("b", [0.0, 1.0, None, None], error="sandbox 23 is out of disk"))
        with pytest.raises(FailureBudgetError):
            await buffer.acquire()

    run_virtual(main())


def test_r05_old_failures_leave_the_window() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=99, max_failure_rate=0.5, failure_window=4, min_failures=3))
        await admitted(buffer, "a", rewards=[None, None])
        for i in range(20):
            await admitted(buffer, f"good{i}a", f"good{i}b")
            await admitted(buffer, f"bad{i}", rewards=[None, None])

    run_virtual(main())


def test_a_group_is_never_put_or_released_twice() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        await admitted(buffer, "a", "b")
        with pytest.raises(BufferStateError, match="'a' was put before"):
            buffer.put(make_ref("a"))
        batch = await buffer.take()
        buffer.release(batch)
        with pytest.raises(BufferStateError, match="'a' is already trained and cannot become trained"):
            buffer.release(batch)
        with pytest.raises(BufferStateError, match="'a' is already trained"):
            buffer.put(make_ref("a"))
        assert buffer.counts().twice == 2
        assert buffer.counts().trained == 2

    run_virtual(main())


def test_unknown_and_untaken_groups_are_refused_by_name() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        with pytest.raises(BufferStateError, match="'x' was never issued"):
            buffer.put(make_ref("x"))
        with pytest.raises(BufferStateError, match="'x' was never issued"):
            buffer.release(["x"])
        with pytest.raises(BufferStateError, match="'x' is issued without a credit"):
            buffer.issue("x", Prompt(id="p"))
        with pytest.raises(BufferStateError, match="no unused credit"):
            buffer.refund()
        await admitted(buffer, "a")
        with pytest.raises(BufferStateError, match="'a' cannot be released: it was not taken"):
            buffer.release(["a"])
        await buffer.acquire()
        with pytest.raises(BufferStateError, match="'a' was already issued and is buffered"):
            buffer.issue("a", Prompt(id="p"))
        with pytest.raises(BufferStateError, match="use filtered, stale, failed or aborted"):
            buffer.forfeit("a", Fate.TRAINED, "no")

    run_virtual(main())


def test_releasing_a_batch_with_one_wrong_group_changes_nothing() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        await admitted(buffer, "a", "b")
        batch = await buffer.take()
        with pytest.raises(BufferStateError, match="'x' was never issued"):
            buffer.release([*batch, "x"])
        with pytest.raises(BufferStateError, match="'a' is in the list twice"):
            buffer.release([batch[0], batch[0]])
        assert buffer.counts().trained == 0
        buffer.release(batch)

    run_virtual(main())


def test_versions_never_go_back() -> None:
    buffer = GroupBuffer(make_config(), version=3)
    with pytest.raises(BufferStateError, match="version 2 comes after 3"):
        buffer.set_version(2)


def test_taking_again_without_releasing_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0))
        await admitted(buffer, "a", "b")
        await buffer.take()
        with pytest.raises(BufferStateError, match="2 taken groups hold 2 of 2 credits"):
            await buffer.take()

    run_virtual(main())


def test_a_closed_buffer_wakes_everybody_who_waits() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0))
        await issue(buffer, "a", "b")
        taking, acquiring = asyncio.create_task(buffer.take()), asyncio.create_task(buffer.acquire())
        await asyncio.sleep(0)
        buffer.close(ZeroDivisionError("the producer divided"))
        for waiting in (taking, acquiring):
            with pytest.raises(ZeroDivisionError, match="the producer divided"):
                await waiting
        assert buffer.counts().aborted == 2
        assert buffer.credits_used == 0

    run_virtual(main())


def test_a_finished_producer_leaves_full_batches_and_then_an_error() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        await admitted(buffer, "a", "b", "c")
        buffer.finish("the prompts ended after 3")
        assert len(await buffer.take()) == 2
        with pytest.raises(BufferClosedError, match="needs 2 groups, 1 are ready and none is running: the prompts"):
            await buffer.take()
        buffer.close()
        assert buffer.fate("c") is Fate.ABORTED

    run_virtual(main())


def test_an_observer_sees_every_change_of_fate_with_reason_and_version() -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        buffer = GroupBuffer(make_config(), observer=events.append)
        await admitted(buffer, "a", "b")
        await admitted(buffer, "c", rewards=[1.0, 1.0])
        await issue(buffer, "d")
        batch = await buffer.take()
        buffer.set_version(1)
        buffer.release(batch)
        buffer.forfeit("d", Fate.ABORTED, "worker lost")
        assert [(e.group_id, e.fate, e.reason, e.version) for e in events] == [
            ("a", Fate.IN_FLIGHT, "", 0),
            ("a", Fate.BUFFERED, "", 0),
            ("b", Fate.IN_FLIGHT, "", 0),
            ("b", Fate.BUFFERED, "", 0),
            ("c", Fate.IN_FLIGHT, "", 0),
            ("c", Fate.FILTERED, "zero_spread", 0),
            ("d", Fate.IN_FLIGHT, "", 0),
            ("a", Fate.TRAINED, "", 1),
            ("b", Fate.TRAINED, "", 1),
            ("d", Fate.ABORTED, "worker lost", 1),
        ]
        assert {e.prompt_id for e in events if e.group_id == "a"} == {"p-a"}

    run_virtual(main())


def test_the_proof_line_shows_the_sum_and_what_is_missing() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        await admitted(buffer, "a", "b")
        await admitted(buffer, "c", rewards=[1.0, 1.0])
        assert buffer.proof().startswith("issued ≠ trained + filtered + stale + failed + aborted, in flight 2: 0 lost")
        buffer.release(await buffer.take())
        assert buffer.proof() == (
            "issued = trained + filtered + stale + failed + aborted, in flight 0: 0 lost, 0 twice "
            "(groups: 3 = 2 + 1 + 0 + 0 + 0)"
        )

    run_virtual(main())


def test_waiting_for_a_batch_is_measured() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        await admitted(buffer, "a")
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(3)
        await admitted(buffer, "b")
        await taking
        assert now() == 3
        metrics = buffer.metrics()
        assert metrics["buffer/take_wait_s"] == 3
        assert (metrics["buffer/taken"], metrics["buffer/queued"], metrics["buffer/credits"]) == (2, 0, 4)
        assert buffer.metrics()["buffer/take_wait_s"] == 0

    run_virtual(main())


def test_a_filter_that_raises_ends_the_buffer_with_its_error() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(filter="scripted_rollout:broken_filter"))
        taking = asyncio.create_task(buffer.take())
        await issue(buffer, "a")
        with pytest.raises(KeyError, match="no such label"):
            buffer.put(make_ref("a"))
        with pytest.raises(KeyError, match="no such label"):
            await taking
        assert buffer.fate("a") is Fate.ABORTED

    run_virtual(main())


def test_d03_groups_sampled_over_need_stay_in_the_buffer_for_the_next_steps() -> None:
    async def main() -> None:
        config = make_config(max_staleness=1, oversampling=2.0, stragglers="overtake")
        buffer = GroupBuffer(config)
        await admitted(buffer, *"01234567")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.acquire(), timeout=1000)
        for version, batch in ((1, ["0", "1"]), (2, ["2", "3"])):
            taken = await buffer.take()
            assert [ref.id for ref in taken] == batch
            buffer.set_version(version)
            buffer.release(taken)
        await admitted(buffer, "8", "9", versions=2)
        assert [ref.id for ref in await buffer.take()] == ["8", "9"], "the others have become too old meanwhile"
        assert buffer.metrics()["buffer/discarded/stale"] == 4

    run_virtual(main())


def test_a_group_whose_episodes_have_many_trajectories_is_judged_by_episode() -> None:
    """S04: sub-agents and compactions fan an episode out; policies, filters and budgets still count episodes."""

    async def main() -> None:
        config = make_config(group_size=3, groups_per_step=1, max_staleness=2)
        buffer = GroupBuffer(config, version=4)
        await issue(buffer, "a", "b", "c")
        one_old = make_fan_out_ref("a", {0.0: [4, 4], 1.0: [4, 1, 4], 0.5: [4]})
        assert buffer.put(one_old) is Fate.BUFFERED
        (ref,) = await buffer.take()
        assert ref.metadata[MASKED_EPISODES] == ("a/1",), "one old trajectory makes its episode stale, no other"
        assert buffer.metrics()["buffer/staleness_max"] == 0
        assert buffer.put(make_fan_out_ref("b", {0.0: [1, 4], 1.0: [4, 1], 0.5: [1]})) is Fate.STALE
        alike = make_fan_out_ref("c", {1.0: [4, 4, 4]}, failed=2)
        assert buffer.put(alike) is Fate.FAILED, "three trajectories, but one rewarded episode"

    run_virtual(main())


def test_wait_holds_a_batch_back_until_the_straggler_is_in_it() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=1, stragglers="wait"))
        await issue(buffer, "slow", "fast")
        buffer.put(make_ref("fast"))
        buffer.release(await buffer.take())
        buffer.set_version(1)
        await admitted(buffer, "next", versions=1)
        taking = asyncio.create_task(buffer.take())
        await asyncio.sleep(10)
        assert not taking.done(), "a step on `next` would make `slow` too old"
        buffer.put(make_ref("slow"))
        assert [ref.id for ref in await taking] == ["slow"]

    run_virtual(main())
