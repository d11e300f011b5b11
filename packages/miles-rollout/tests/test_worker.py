"""Episodes against scripted sessions: permits, deadlines, failures, retries, cancellation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from miles_rollout import GroupRequest, RolloutConfigError, Worker
from miles_tito import Ctx, EngineError, EpisodeResult, FinishReason, Outcome, Policy, Prompt, Sampling, VersionSpan
from scripted_rollout import (
    ScriptedEnv,
    ScriptedSessions,
    graded,
    make_config,
    now,
    run_virtual,
    trajectory,
)

PROMPT = Prompt(id="p0")


def make_worker(env: ScriptedEnv, sessions: ScriptedSessions, **fields: Any) -> Worker:
    defaults: dict[str, Any] = {
        "sampling": Sampling(),
        "run_id": "run",
        "episode_timeout_s": 60.0,
        "permits": 64,
        "grace_s": 5.0,
        "retries": 0,
    }
    return Worker(env=env, sessions=sessions, **(defaults | fields))


async def answer(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
    """Episode i takes i + 1 seconds and earns i."""
    index = int(ctx.episode_id.rsplit("/", 1)[1])
    await asyncio.sleep(index + 1)
    return graded(float(index))


def test_a_group_runs_its_episodes_at_once_and_keeps_their_order() -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        group = await make_worker(ScriptedEnv(answer), sessions).run_group(
            GroupRequest(prompt=PROMPT, group_id="g1", group_size=4)
        )
        assert now() == 4
        assert [e.id for e in group.episodes] == ["g1/0", "g1/1", "g1/2", "g1/3"]
        assert [e.reward for e in group.episodes] == [0, 1, 2, 3]
        assert [e.seconds for e in group.episodes] == [1, 2, 3, 4]
        assert group.episodes[2].trajectories[0].id == "g1-2.0"
        assert sessions.opened["g1-2.0"] == {
            "run_id": "run",
            "prompt_id": "p0",
            "group_id": "g1",
            "episode_id": "g1/2",
            "attempt": 0,
            "deadline_s": 60.0,
        }
        assert not sessions.live

    run_virtual(main())


def test_a_permit_is_free_the_moment_its_episode_ends_not_its_group() -> None:
    async def main() -> None:
        seconds = {"a/0": 1, "a/1": 100, "b/0": 1, "b/1": 1}
        started: dict[str, float] = {}

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            started[ctx.episode_id] = now()
            await asyncio.sleep(seconds[ctx.episode_id])
            return graded()

        env = ScriptedEnv(play)
        worker = make_worker(env, ScriptedSessions(), permits=2, episode_timeout_s=1000)
        async with asyncio.TaskGroup() as groups:
            groups.create_task(worker.run_group(GroupRequest(prompt=PROMPT, group_id="a", group_size=2)))
            groups.create_task(worker.run_group(GroupRequest(prompt=PROMPT, group_id="b", group_size=2)))
        assert started == {"a/0": 0, "a/1": 0, "b/0": 1, "b/1": 2}, "group b runs beside the straggler of a"
        assert env.most_running == 2

    run_virtual(main())


def test_hundreds_of_episodes_run_at_once_and_never_more_than_the_permits() -> None:
    async def main() -> None:
        env, sessions = ScriptedEnv(answer), ScriptedSessions()
        worker = make_worker(env, sessions, permits=300, episode_timeout_s=1000)
        async with asyncio.TaskGroup() as groups:
            for i in range(100):
                groups.create_task(worker.run_group(GroupRequest(prompt=PROMPT, group_id=f"g{i}", group_size=8)))
        assert env.most_running == 300
        assert len(sessions.closed) == 800

    run_virtual(main())


def test_the_time_spent_waiting_for_a_permit_does_not_count_against_the_deadline() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            assert ctx.deadline == now() + 60
            await asyncio.sleep(50)
            return graded()

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), permits=1)
        group = await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=3))
        assert [(e.outcome, e.seconds) for e in group.episodes] == [(Outcome.GRADED, 50)] * 3
        assert now() == 150

    run_virtual(main())


def test_an_environment_that_ignores_its_deadline_is_cancelled_after_the_grace() -> None:
    async def main() -> None:
        cancelled_at: list[float] = []

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            try:
                await asyncio.sleep(10_000)
            except asyncio.CancelledError:
                assert ctx.cancelled.is_set()
                cancelled_at.append(now())
                raise
            return graded()

        sessions = ScriptedSessions()
        group = await make_worker(ScriptedEnv(play), sessions).run_group(
            GroupRequest(prompt=PROMPT, group_id="g", group_size=1)
        )
        assert cancelled_at == [65]
        (episode,) = group.episodes
        assert (episode.outcome, episode.reward, episode.trajectories) == (Outcome.INFRA_ABORT, None, ())
        assert episode.error is not None
        assert "ignored its deadline: still running 5 s after the 60 s of `episode_timeout_s`" in episode.error
        assert sessions.closed == ["g-0.0"]

    run_virtual(main())


def test_an_environment_may_end_by_itself_at_its_deadline_and_be_graded() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            assert ctx.deadline is not None
            await asyncio.sleep(ctx.deadline - now() + 1)
            assert ctx.cancelled.is_set()
            return EpisodeResult(outcome=Outcome.POLICY_LIMIT, reward=0.25)

        group = await make_worker(ScriptedEnv(play), ScriptedSessions()).run_group(
            GroupRequest(prompt=PROMPT, group_id="g", group_size=1)
        )
        assert [(e.outcome, e.reward) for e in group.episodes] == [(Outcome.POLICY_LIMIT, 0.25)]

    run_virtual(main())


def test_an_environment_that_swallows_its_cancellation_is_left_behind_and_its_permit_is_free() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue
            return graded()

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), permits=1)
        group = await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=2))
        assert [e.outcome for e in group.episodes] == [Outcome.INFRA_ABORT] * 2
        assert worker.metrics()["worker/abandoned"] == 2
        released.set()
        await asyncio.sleep(1)
        assert worker.metrics()["worker/abandoned"] == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionError("engine is gone"), "ConnectionError: engine is gone"),
        (asyncio.CancelledError(), "the environment cancelled itself"),
    ],
)
def test_an_exception_of_the_environment_is_a_failed_episode_and_never_a_reward_of_0(
    error: BaseException, text: str
) -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            if ctx.episode_id == "g/1":
                raise error
            return graded()

        sessions = ScriptedSessions()
        group = await make_worker(ScriptedEnv(play), sessions).run_group(
            GroupRequest(prompt=PROMPT, group_id="g", group_size=3)
        )
        assert [e.reward for e in group.episodes] == [1, None, 1]
        failed = group.episodes[1]
        assert (failed.outcome, failed.error, failed.trajectories) == (Outcome.INFRA_ABORT, text, ())
        assert len(sessions.closed) == 3

    run_virtual(main())


def test_r05_a_reward_error_that_the_environment_reports_is_kept_and_not_repeated() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            return EpisodeResult(outcome=Outcome.VERIFIER_INVALID, error="the grader raised KeyError: 'label'")

        sessions = ScriptedSessions()
        worker = make_worker(ScriptedEnv(play), sessions, retries=3)
        (episode,) = (await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1))).episodes
        assert (episode.outcome, episode.reward) == (Outcome.VERIFIER_INVALID, None)
        assert list(sessions.opened) == ["g-0.0"], "the same verifier would say the same again"

    run_virtual(main())


def test_an_environment_that_returns_something_else_is_told_what_to_return() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            return 1.0  # pyright: ignore[reportReturnType]

        worker = make_worker(ScriptedEnv(play), ScriptedSessions())
        (episode,) = (await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1))).episodes
        assert episode.error == "TypeError: env.run returned float; it must return an EpisodeResult"

    run_virtual(main())


def test_infrastructure_failures_are_retried_as_attempts_of_the_same_episode() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            if ctx.attempt < 5:
                raise ConnectionError("engine restarts")
            return graded()

        sessions = ScriptedSessions()
        worker = make_worker(ScriptedEnv(play), sessions, retries=2)
        (episode,) = (
            await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1, attempt=3))
        ).episodes
        assert (episode.id, episode.attempt, episode.reward) == ("g/0", 5, 1)
        assert sessions.closed == ["g-0.3", "g-0.4", "g-0.5"]
        assert worker.metrics()["worker/retried"] == 2
        assert [(a.attempt, a.outcome, a.error) for a in episode.failed_attempts] == [
            (3, Outcome.INFRA_ABORT, "ConnectionError: engine restarts"),
            (4, Outcome.INFRA_ABORT, "ConnectionError: engine restarts"),
        ]
        assert episode.finished_at is not None
        assert all(a.finished_at <= episode.finished_at for a in episode.failed_attempts)

    run_virtual(main())


def test_attempts_wait_longer_each_time_and_hold_no_permit_meanwhile() -> None:
    async def main() -> None:
        began: dict[str, list[float]] = {"broken": [], "sound": []}

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            began[prompt.id].append(now())
            if prompt.id == "broken":
                raise ConnectionError("engine restarts")
            return graded()

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), permits=1, retries=8, backoff_s=2.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run_group(GroupRequest(prompt=Prompt(id="broken"), group_id="a", group_size=1)))
            tasks.create_task(worker.run_group(GroupRequest(prompt=Prompt(id="sound"), group_id="b", group_size=1)))
        assert began["sound"] == [0.0], "it ran while the other one waited"
        waits = [later - earlier for earlier, later in pairwise(began["broken"])]
        for wait, expected in zip(waits, [2, 4, 8, 16, 32, 60, 60, 60], strict=True):
            assert 0.75 * expected <= wait <= 1.25 * expected

    run_virtual(main())


@pytest.mark.parametrize(("partial", "mask", "oldest"), [("train", "01111111", 3), ("mask", "00001111", 4)])
def test_t01_tokens_from_before_a_weight_update_are_trained_or_only_read(partial: Any, mask: str, oldest: int) -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            return graded()

        sessions = ScriptedSessions()
        spans = (VersionSpan(start=1, end=4, version=3), VersionSpan(start=4, end=8, version=4))
        sessions.recorded = lambda session_id, version: (replace(trajectory(session_id, length=8), versions=spans),)
        worker = make_worker(ScriptedEnv(play), sessions, partial=partial)
        (episode,) = (await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1))).episodes
        (recorded,) = episode.trajectories
        assert "".join(str(int(trained)) for trained in recorded.loss_mask) == mask
        assert episode.oldest_version == oldest
        assert episode.loss_denominator == mask.count("1")
        assert recorded.versions == spans, "what really happened stays on record"
        assert (recorded.logprobs[1:] == -0.5).all()

    run_virtual(main())


def test_the_last_failure_stands_when_every_attempt_failed() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            raise ConnectionError(f"try {ctx.attempt}")

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), retries=2)
        (episode,) = (await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1))).episodes
        assert (episode.attempt, episode.error) == (2, "ConnectionError: try 2")

    run_virtual(main())


def test_a_session_that_cannot_be_opened_fails_one_episode_and_is_closed() -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        sessions.refuse_open = lambda session_id: EngineError("503") if session_id == "g-0.0" else None
        group = await make_worker(ScriptedEnv(answer), sessions).run_group(
            GroupRequest(prompt=PROMPT, group_id="g", group_size=2)
        )
        assert [e.error for e in group.episodes] == ["EngineError: 503", None]
        assert sorted(sessions.closed) == ["g-0.0", "g-1.0"]

    run_virtual(main())


def test_a_session_server_that_never_answers_costs_one_timeout_and_not_the_run() -> None:
    class Silent(ScriptedSessions):
        async def open(self, session_id: str, **fields: Any) -> Policy:
            await asyncio.Event().wait()
            raise AssertionError("never reached")

    async def main() -> None:
        worker = make_worker(ScriptedEnv(answer), Silent())
        (episode,) = (await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=1))).episodes
        assert episode.error == "TimeoutError: the session was not opened within 60 s"
        assert now() == 60

    run_virtual(main())


def test_a_session_that_cannot_be_closed_does_not_lose_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        sessions.refuse_close = lambda session_id: EngineError("404")
        (episode,) = (
            await make_worker(ScriptedEnv(answer), sessions).run_group(
                GroupRequest(prompt=PROMPT, group_id="g", group_size=1)
            )
        ).episodes
        assert episode.outcome is Outcome.GRADED

    run_virtual(main())
    assert "session g-0.0 was not closed: EngineError: 404" in caplog.text


def test_aborted_trajectories_are_left_out() -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        sessions.recorded = lambda session_id, version: (
            trajectory("whole"),
            trajectory("cut", finish=FinishReason.ABORT),
        )
        (episode,) = (
            await make_worker(ScriptedEnv(answer), sessions).run_group(
                GroupRequest(prompt=PROMPT, group_id="g", group_size=1)
            )
        ).episodes
        assert [t.id for t in episode.trajectories] == ["whole"]

    run_virtual(main())


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ((), "recorded no sampled token; it has to send its model calls to `policy.base_url`"),
        ((trajectory(length=1),), "recorded no sampled token"),
        ((trajectory(finish=FinishReason.ABORT),), "all of its 1 trajectories were aborted"),
    ],
)
def test_a_reward_without_a_sampled_token_is_a_failure_that_says_why(recorded: Any, message: str) -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        sessions.recorded = lambda session_id, version: recorded
        (episode,) = (
            await make_worker(ScriptedEnv(answer), sessions).run_group(
                GroupRequest(prompt=PROMPT, group_id="g", group_size=1)
            )
        ).episodes
        assert (episode.outcome, episode.reward) == (Outcome.INFRA_ABORT, None)
        assert episode.error is not None
        assert message in episode.error

    run_virtual(main())


def test_cancelling_a_group_cancels_its_environments_and_closes_its_sessions() -> None:
    async def main() -> None:
        seen: list[Ctx] = []

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            seen.append(ctx)
            await asyncio.sleep(1000)
            return graded()

        env, sessions = ScriptedEnv(play), ScriptedSessions()
        worker = make_worker(env, sessions, permits=2)
        running = asyncio.create_task(worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=4)))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert env.running == 0
        assert not sessions.live
        assert len(seen) == 2, "the other two were waiting for a permit"
        assert all(ctx.cancelled.is_set() for ctx in seen)
        assert now() == 1
        assert worker.metrics()["worker/running"] == 0

    run_virtual(main())


def test_cancellation_does_not_wait_for_environments_that_ignore_it() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(100)
            return graded()

        sessions = ScriptedSessions()
        worker = make_worker(ScriptedEnv(play), sessions)
        running = asyncio.create_task(worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=2)))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert now() < 10, "Ctrl-C ends a run within 10 s"
        assert not sessions.live

    run_virtual(main())


def test_t09_sessions_are_opened_with_the_sampling_of_training_unless_a_group_asks_otherwise() -> None:
    async def main() -> None:
        sessions = ScriptedSessions()
        worker = make_worker(ScriptedEnv(answer), sessions, sampling=Sampling(temperature=0.6))
        await worker.run_group(GroupRequest(prompt=PROMPT, group_id="train", group_size=1))
        await worker.run_group(
            GroupRequest(prompt=PROMPT, group_id="eval", group_size=1, sampling=Sampling(temperature=0.0))
        )
        assert {name: s.temperature for name, s in sessions.samplings.items()} == {"train-0.0": 0.6, "eval-0.0": 0.0}

    run_virtual(main())


def test_a_group_id_that_cannot_stand_in_a_url_is_refused() -> None:
    async def main() -> None:
        worker = make_worker(ScriptedEnv(answer), ScriptedSessions())
        with pytest.raises(ValueError, match="Group id 'a/b' must be made of"):
            await worker.run_group(GroupRequest(prompt=PROMPT, group_id="a/b", group_size=1))
        with pytest.raises(ValueError, match="`group_size` is 0"):
            await worker.run_group(GroupRequest(prompt=PROMPT, group_id="a", group_size=0))

    run_virtual(main())


def test_workers_share_the_permits_of_the_configuration() -> None:
    async def main() -> None:
        env = ScriptedEnv(answer)
        config = make_config(max_concurrent_episodes=7, episode_timeout_s=1000.0)
        worker = Worker.from_config(config, env=env, sessions=ScriptedSessions(), run_id="r", num_workers=2)
        await worker.run_group(GroupRequest(prompt=PROMPT, group_id="g", group_size=10))
        assert env.most_running == 3
        with pytest.raises(RolloutConfigError, match="8 workers cannot share 7 permits"):
            Worker.from_config(config, env=env, sessions=ScriptedSessions(), run_id="r", num_workers=8)

    run_virtual(main())


@pytest.mark.parametrize("held", [None, (20, 40), (50, 70)])
def test_an_episode_that_spent_its_time_without_engines_has_failed_and_is_repeated(
    held: tuple[float, float] | None,
) -> None:
    async def main() -> None:
        attempts: list[int] = []

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            attempts.append(ctx.attempt)
            assert ctx.deadline is not None
            if ctx.attempt == 0:
                await asyncio.sleep(ctx.deadline - now())
                return EpisodeResult(outcome=Outcome.POLICY_LIMIT, reward=0.0)
            return graded()

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), episode_timeout_s=60, retries=1)
        running = asyncio.create_task(worker.run_group(GroupRequest(prompt=Prompt(id="p"), group_id="g", group_size=1)))
        if held is not None:
            await asyncio.sleep(held[0])
            worker.hold(True)
            await asyncio.sleep(held[1] - held[0])
            worker.hold(False)
        [episode] = (await running).episodes
        is_hit = held is not None
        assert (episode.outcome, attempts) == ((Outcome.GRADED, [0, 1]) if is_hit else (Outcome.POLICY_LIMIT, [0]))
        if is_hit:
            assert "no engine served for a part of it" in (episode.failed_attempts[0].error or "")

    run_virtual(main())


def test_episodes_start_only_while_an_engine_serves() -> None:
    async def main() -> None:
        started: list[float] = []

        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            started.append(now())
            assert ctx.deadline == now() + 60
            return graded()

        worker = make_worker(ScriptedEnv(play), ScriptedSessions(), episode_timeout_s=60)
        worker.hold(True)
        running = asyncio.create_task(worker.run_group(GroupRequest(prompt=Prompt(id="p"), group_id="g", group_size=2)))
        await asyncio.sleep(500)
        worker.hold(False)
        await running
        assert started == [500, 500]

    run_virtual(main())
