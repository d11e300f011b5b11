"""The producer keeps the buffer supplied, in order, and never fails silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from miles_rollout import (
    BufferClosedError,
    BufferStateError,
    EmptyBatchesError,
    FailureBudgetError,
    Fate,
    FateCounts,
    FateEvent,
    Gate,
    GroupBuffer,
    GroupRequest,
    PromptStream,
    Resume,
    ResumedGroup,
    Retry,
    Worker,
    produce,
)
from miles_tito import Ctx, EpisodeResult, GroupRef, Policy, Prompt
from scripted_rollout import (
    ScriptedEnv,
    ScriptedSessions,
    graded,
    make_config,
    make_prompts,
    make_ref,
    now,
    run_virtual,
)


class ScriptedRuns:
    """`run_group` that takes a set time, samples from the buffer's version, and remembers what it was asked for."""

    def __init__(
        self, buffer: GroupBuffer, *, seconds: Callable[[int], float] = lambda number: 1.0, **ref_fields: Any
    ) -> None:
        self.started: list[tuple[float, str, str]] = []
        self.attempts: dict[str, int] = {}
        self.running = 0
        self._buffer = buffer
        self._seconds = seconds
        self._ref_fields = ref_fields

    async def __call__(self, request: GroupRequest) -> GroupRef:
        prompt, group_id = request.prompt, request.group_id
        self.started.append((now(), group_id, prompt.id))
        self.attempts[group_id] = request.attempt
        self.running += 1
        version = self._buffer.version
        try:
            await asyncio.sleep(self._seconds(int(group_id[1:])))
        finally:
            self.running -= 1
        fields: dict[str, Any] = {"versions": version} | self._ref_fields
        return make_ref(group_id, prompt_id=prompt.id, **fields)


async def train(buffer: GroupBuffer, steps: int, *, seconds: float = 1.0) -> list[list[str]]:
    """Take, wait, commit; the ids of each batch."""
    batches: list[list[str]] = []
    for _ in range(steps):
        batch = await buffer.take()
        batches.append([ref.id for ref in batch])
        await asyncio.sleep(seconds)
        buffer.set_version(buffer.version + 1)
        buffer.release(batch)
    return batches


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_as_many_groups_run_at_once_as_there_are_credits() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=1))
        runs = ScriptedRuns(buffer)
        stream = PromptStream(make_prompts(3), shuffle=False)
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        await asyncio.sleep(0.5)
        assert runs.started == [(0, "g000000", "p0"), (0, "g000001", "p1"), (0, "g000002", "p2"), (0, "g000003", "p0")]
        await asyncio.sleep(10)
        assert len(runs.started) == 4, "nothing was released"
        batches = await train(buffer, 2)
        assert batches == [["g000000", "g000001"], ["g000002", "g000003"]]
        await stop(producer)
        buffer.close()
        assert buffer.counts().in_flight == 0

    run_virtual(main())


def test_a_synchronous_run_never_issues_a_group_before_the_weights_are_committed() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_staleness=0))
        runs = ScriptedRuns(buffer)
        stream = PromptStream(make_prompts(3))
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        await train(buffer, 3, seconds=4)
        await stop(producer)
        assert [time for time, _, _ in runs.started][:6] == [0, 0, 5, 5, 10, 10]

    run_virtual(main())


def test_a_group_is_spooled_before_the_buffer_admits_it() -> None:
    async def main() -> None:
        log: list[str] = []

        async def spool(ref: GroupRef) -> None:
            await asyncio.sleep(1)
            log.append(f"spooled {ref.id}")

        def observe(event: FateEvent) -> None:
            if event.fate is Fate.BUFFERED:
                log.append(f"buffered {event.group_id}")

        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=0), observer=observe)
        stream = PromptStream(make_prompts(3))
        producer = asyncio.create_task(
            produce(prompts=stream, buffer=buffer, run_group=ScriptedRuns(buffer), group_size=2, spool=spool)
        )
        await train(buffer, 2)
        await stop(producer)
        assert log[:4] == ["spooled g000000", "buffered g000000", "spooled g000001", "buffered g000001"]

    run_virtual(main())


def test_the_gate_holds_new_groups_back_while_running_ones_finish() -> None:
    async def main() -> None:
        gate = Gate()
        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=0))
        runs = ScriptedRuns(buffer)
        stream = PromptStream(make_prompts(3))
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2, gate=gate))
        await asyncio.sleep(0.5)
        with gate.closed(), gate.closed():
            assert await train(buffer, 1) == [["g000000"]]
            await asyncio.sleep(100)
            assert len(runs.started) == 1
        await train(buffer, 1)
        assert runs.started[1][0] == 102
        await stop(producer)

    run_virtual(main())


def test_the_prompt_of_a_stale_group_comes_before_new_prompts() -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        config = make_config(
            groups_per_step=1, max_staleness=1, stragglers="overtake", put_policy="retry", take_policy="retry"
        )
        buffer = GroupBuffer(config, observer=events.append)
        runs = ScriptedRuns(buffer, seconds=lambda number: 6.5 if number == 0 else 1.0)
        stream = PromptStream(make_prompts(99), shuffle=False)
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        await train(buffer, 4)
        await stop(producer)
        stale = [event.group_id for event in events if event.fate is Fate.STALE]
        retried = [event for event in events if event.retry_of == "g000000"]
        assert stale == ["g000000"]
        assert [event.prompt_id for event in retried] == ["p0"]

    run_virtual(main())


@pytest.mark.parametrize("where", ["run_group", "spool", "prompts"])
def test_a_broken_contract_ends_the_run_on_both_sides_with_its_error(where: str) -> None:
    async def main() -> None:
        async def run_group(request: GroupRequest) -> GroupRef:
            await asyncio.sleep(1 if request.group_id == "g000000" else 100)
            if where == "run_group":
                raise ConnectionResetError("the worker is gone")
            return make_ref(request.group_id, prompt_id=request.prompt.id)

        async def spool(ref: GroupRef) -> None:
            if where == "spool":
                raise ConnectionResetError("the disk is full")

        class Broken:
            drawn = 0

            def next(self) -> Prompt:
                if where == "prompts":
                    raise ConnectionResetError("the data set is gone")
                return Prompt(id="p")

        buffer = GroupBuffer(make_config())
        taking = asyncio.create_task(buffer.take())
        with pytest.raises(ConnectionResetError, match=r"is gone|is full"):
            await produce(prompts=Broken(), buffer=buffer, run_group=run_group, group_size=2, spool=spool)
        with pytest.raises(ConnectionResetError, match=r"is gone|is full"):
            await taking
        counts = buffer.counts()
        assert (counts.in_flight, counts.lost, buffer.credits_used) == (0, 0, 0)
        assert counts.aborted == counts.issued

    run_virtual(main())


def test_s03_a_run_whose_groups_are_all_filtered_stops_by_itself() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_empty_batches=4))
        runs = ScriptedRuns(buffer, rewards=[0.0, 0.0])

        async def loop() -> None:
            async with asyncio.TaskGroup() as tasks:
                stream = PromptStream(make_prompts(3))
                tasks.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
                await buffer.take()

        with pytest.raises(ExceptionGroup) as caught:
            await loop()
        assert caught.value.subgroup(EmptyBatchesError) is not None
        assert caught.value.split(EmptyBatchesError)[1] is None, "nothing but the advice is raised"
        assert buffer.counts().filtered == 8

    run_virtual(main())


def test_engines_that_never_get_the_new_weights_stop_the_run_with_the_reason() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config(max_empty_batches=4, put_policy="keep"))
        runs = ScriptedRuns(buffer, versions=0)
        stream = PromptStream(make_prompts(3))
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        with pytest.raises(EmptyBatchesError, match=r"8 engine_behind.*check that every push reaches every engine"):
            await train(buffer, 9)
        with pytest.raises(EmptyBatchesError):
            await producer

    run_virtual(main())


def test_a_cancelled_producer_aborts_what_still_runs_with_the_reason() -> None:
    async def main() -> None:
        events: list[FateEvent] = []
        buffer = GroupBuffer(make_config(), observer=events.append)
        runs = ScriptedRuns(buffer, seconds=lambda number: 1.0 if number < 2 else 100.0)
        stream = PromptStream(make_prompts(3))
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        await asyncio.sleep(2)
        await stop(producer)
        assert runs.running == 0
        assert {e.group_id: e.reason for e in events if e.fate is Fate.ABORTED} == {
            "g000002": "cancelled",
            "g000003": "cancelled",
        }
        assert len(await buffer.take()) == 2, "finished groups can still be trained"
        with pytest.raises(BufferClosedError, match="the producer was cancelled"):
            await buffer.take()

    run_virtual(main())


def test_prompts_that_end_leave_what_was_issued_to_training() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        runs = ScriptedRuns(buffer)
        stream = PromptStream(iter(make_prompts(5)))
        producer = asyncio.create_task(produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2))
        assert len(await train(buffer, 2)) == 2
        with pytest.raises(BufferClosedError, match=r"1 are ready and none is running.*ended after 5"):
            await buffer.take()
        await producer

    run_virtual(main())


def test_a_resumed_producer_finishes_what_was_open_before_it_issues_anything_new() -> None:
    prompts = {p.id: p for p in make_prompts(4)}
    first, second, third, fourth = prompts.values()
    events: list[FateEvent] = []

    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=3, max_staleness=0), observer=events.append, version=5)
        resume = Resume(
            counts=FateCounts(issued=9, trained=6, filtered=0, stale=0, failed=0, aborted=0, in_flight=3, twice=0),
            groups=(
                ResumedGroup(
                    id="g000006", prompt=first, issued_version=4, ref=make_ref("g000006", versions=5), is_admitted=True
                ),
                ResumedGroup(id="g000007", prompt=second, issued_version=4, ref=make_ref("g000007", versions=5)),
                ResumedGroup(id="g000008", prompt=third, issued_version=5, attempt=2),
            ),
            next_group=17,
        )
        buffer.restore(resume)
        runs = ScriptedRuns(buffer)
        stream = PromptStream([fourth])
        producer = asyncio.create_task(
            produce(prompts=stream, buffer=buffer, run_group=runs, group_size=2, resume=resume)
        )
        (batch,) = await train(buffer, 1)
        assert batch == ["g000006", "g000007", "g000008"], "in the order of their issue"
        await asyncio.sleep(0.5)
        started = [(group, runs.attempts[group]) for _, group, _ in runs.started]
        assert started == [("g000008", 2), ("g000017", 0), ("g000018", 0), ("g000019", 0)]
        issued = [(e.group_id, e.drawn) for e in events if e.fate is Fate.IN_FLIGHT]
        assert issued == [("g000017", 1), ("g000018", 2), ("g000019", 3)]
        await stop(producer)
        buffer.close()
        assert "in flight 0: 0 lost, 0 twice (groups: 12 = 9 + 0 + 0 + 0 + 3)" in buffer.proof()

    run_virtual(main())


def test_prompts_of_groups_that_a_stop_made_too_old_come_again_in_the_order_of_their_issue() -> None:
    prompts = make_prompts(3)

    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=2, max_staleness=0, take_policy="drop"), version=5)
        groups = tuple(
            ResumedGroup(
                id=f"g{i}", prompt=prompts[i], issued_version=3, ref=make_ref(f"g{i}", versions=v), is_admitted=True
            )
            for i, v in enumerate((4, 2, 3))
        )
        counts = FateCounts(issued=3, trained=0, filtered=0, stale=0, failed=0, aborted=0, in_flight=3, twice=0)
        resume = Resume(counts=counts, groups=groups, next_group=3)
        buffer.restore(resume)
        runs = ScriptedRuns(buffer)
        producer = asyncio.create_task(
            produce(prompts=PromptStream(prompts), buffer=buffer, run_group=runs, group_size=2, resume=resume)
        )
        await train(buffer, 2)
        assert [prompt for _, _, prompt in runs.started[:3]] == [prompt.id for prompt in prompts]
        await stop(producer)
        buffer.close()

    run_virtual(main())


def test_open_groups_that_do_not_fit_the_counts_are_refused() -> None:
    async def main() -> None:
        buffer = GroupBuffer(make_config())
        counts = FateCounts(issued=4, trained=2, filtered=0, stale=0, failed=0, aborted=0, in_flight=2, twice=0)
        with pytest.raises(BufferStateError, match="0 open groups are restored, counted are 2"):
            buffer.restore(Resume(counts=counts))

    run_virtual(main())


def test_groups_beyond_the_present_credits_hold_new_issues_back() -> None:
    async def main() -> None:
        (prompt,) = make_prompts(1)
        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=0), version=3)
        groups = tuple(
            ResumedGroup(
                id=f"g{i}", prompt=prompt, issued_version=3, ref=make_ref(f"g{i}", versions=3), is_admitted=True
            )
            for i in range(2)
        )
        counts = FateCounts(issued=2, trained=0, filtered=0, stale=0, failed=0, aborted=0, in_flight=2, twice=0)
        buffer.restore(Resume(counts=counts, groups=groups, retries=(Retry(prompt=prompt, retry_of="g0"),)))
        acquired = asyncio.create_task(buffer.acquire())
        buffer.release(await buffer.take())
        await asyncio.sleep(1)
        assert not acquired.done(), "one credit exists, and the other restored group holds it"
        buffer.release(await buffer.take())
        await acquired
        retry = buffer.next_retry()
        assert retry is not None
        assert retry.retry_of == "g0"

    run_virtual(main())


@pytest.mark.parametrize(("broken", "stops"), [({3}, False), (set(range(0, 8, 2)), False), (set(range(1, 8)), True)])
def test_r05_a_reward_that_raises_costs_its_group_and_the_run_only_above_the_budget(
    broken: set[int], stops: bool
) -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            await asyncio.sleep(1)
            if int(prompt.id[1:]) in broken:
                raise KeyError("no such label")
            return graded(float(ctx.episode_id.endswith("/0")))

        events: list[FateEvent] = []
        config = make_config(groups_per_step=2, max_staleness=0, retries=0, max_failure_rate=0.8, min_failures=12)
        buffer = GroupBuffer(config, observer=events.append)
        worker = Worker.from_config(
            config, env=ScriptedEnv(play), sessions=ScriptedSessions(version=lambda: buffer.version), run_id="r"
        )
        producer = asyncio.create_task(
            produce(
                prompts=PromptStream(make_prompts(8)),
                buffer=buffer,
                run_group=worker.run_group_ref,
                group_size=config.group_size,
            )
        )
        if stops:
            with pytest.raises(FailureBudgetError, match=r"KeyError: 'no such label'"):
                await train(buffer, 8)
            with pytest.raises(FailureBudgetError):
                await producer
            return
        await train(buffer, 8)
        failed = [event for event in events if event.fate is Fate.FAILED]
        assert {event.reason for event in failed} == {"too_few_rewards"}
        assert {int(event.prompt_id[1:]) for event in failed} == broken
        await stop(producer)

    run_virtual(main())


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_group_that_only_a_crash_made_too_old_runs_again_whatever_the_policy(is_admitted: bool) -> None:
    events: list[FateEvent] = []

    async def main() -> None:
        (prompt,) = make_prompts(1)
        buffer = GroupBuffer(make_config(groups_per_step=1, max_staleness=0), observer=events.append, version=3)
        resume = Resume(
            counts=FateCounts(issued=4, trained=3, filtered=0, stale=0, failed=0, aborted=0, in_flight=1, twice=0),
            groups=(
                ResumedGroup(
                    id="g000003",
                    prompt=prompt,
                    issued_version=3,
                    ref=make_ref("g000003", versions=-2),
                    is_admitted=is_admitted,
                ),
            ),
            next_group=4,
        )
        buffer.restore(resume)
        runs = ScriptedRuns(buffer)
        producer = asyncio.create_task(
            produce(
                prompts=PromptStream([Prompt(id="other")]), buffer=buffer, run_group=runs, group_size=2, resume=resume
            )
        )
        ((trained,),) = await train(buffer, 1)
        assert trained == "g000004"
        assert runs.started[0][1:] == ("g000004", prompt.id)
        await stop(producer)

    run_virtual(main())
    stale = [event for event in events if event.fate is Fate.STALE]
    assert [(e.group_id, e.reason, e.will_retry) for e in stale] == [("g000003", "resumed_too_late", True)]


def test_no_group_is_issued_behind_one_that_broke() -> None:
    events: list[FateEvent] = []

    async def main() -> None:
        buffer = GroupBuffer(make_config(groups_per_step=2, max_staleness=0), observer=events.append)

        async def run_group(request: GroupRequest) -> GroupRef:
            await asyncio.sleep(1)
            raise OSError("no space left")

        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await produce(prompts=PromptStream(make_prompts(9)), buffer=buffer, run_group=run_group, group_size=2)

    run_virtual(main())
    assert [e.group_id for e in events if e.fate is Fate.IN_FLIGHT] == ["g000000", "g000001"]
