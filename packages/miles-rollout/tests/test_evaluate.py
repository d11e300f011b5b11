"""Evaluation: mean with its error, pass@k, and failures that stay failures."""

from __future__ import annotations

import asyncio
import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_rollout import EvalResult, GroupRequest, LeastBusy, PromptError, PromptScore, RunGroup, Worker, evaluate
from miles_tito import Ctx, EpisodeResult, GroupRef, Outcome, Policy, Prompt, Sampling
from scripted_rollout import ScriptedEnv, ScriptedSessions, graded, make_prompts, make_ref, run_virtual


def make_worker(play: ScriptedEnv, sessions: ScriptedSessions) -> Worker:
    return Worker(
        env=play, sessions=sessions, sampling=Sampling(), run_id="r", episode_timeout_s=9.0, permits=5, retries=0
    )


def result(*rewards: tuple[float, ...], samples: int = 4, failed: int = 0) -> EvalResult:
    return EvalResult(
        name="eval",
        samples_per_prompt=samples,
        prompts=tuple(PromptScore(prompt_id=f"p{i}", rewards=r, num_failed=failed) for i, r in enumerate(rewards)),
        failures={"infra_abort: engine is gone": failed * len(rewards)} if failed else {},
        success_reward=1.0,
        env_metrics={},
        seconds=1.0,
    )


def test_every_prompt_runs_through_the_workers_with_its_own_sampling() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            assert policy.sampling.temperature == 0.0
            return graded(float(prompt.id == "p0"))

        sessions = ScriptedSessions()
        done = await evaluate(
            make_prompts(4),
            run_group=make_worker(ScriptedEnv(play), sessions).run_group_ref,
            samples_per_prompt=2,
            sampling=Sampling(temperature=0.0),
            name="heldout",
            tag="v3",
        )
        assert done.mean == 0.25
        assert done.stderr == 0.25
        assert sorted(sessions.opened)[0] == "heldout-v3-0-0.0"
        assert done.metrics(prefix="eval/heldout")["eval/heldout/pass@2"] == 0.25
        assert done.versions == (0, 0)
        assert done.summary() == "heldout: 0.250 ± 0.250 on 4 prompts, 2 samples each"

    run_virtual(main())


def test_a_failed_episode_is_counted_as_failed_and_never_scored_0() -> None:
    async def main() -> None:
        async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
            if prompt.id == "p1" or ctx.episode_id.endswith("/1"):
                raise ConnectionError("engine is gone")
            return EpisodeResult(outcome=Outcome.GRADED, reward=1.0, metrics={"turns": 2.0})

        worker = make_worker(ScriptedEnv(play), ScriptedSessions())
        done = await evaluate(make_prompts(2), run_group=worker.run_group_ref, samples_per_prompt=2)
        assert done.mean == 1.0
        assert (done.num_scored, done.num_failed) == (1, 3)
        assert done.metrics()["eval/prompts_without_score"] == 1
        assert done.metrics()["eval/failed"] == 0.75
        assert done.metrics()["eval/turns"] == 2
        assert done.summary() == (
            "eval: 1.000 on 2 prompts, 2 samples each; "
            "3 of 4 episodes failed, 3 with: infra_abort: ConnectionError: engine is gone"
        )

    run_virtual(main())


def test_an_evaluation_without_any_score_has_no_mean() -> None:
    empty = result((), (), failed=4)
    assert (empty.mean, empty.stderr, empty.pass_at(1)) == (None, None, None)
    assert not {"eval/score", "eval/score_low", "eval/pass@1"} & set(empty.metrics())
    assert empty.summary().startswith("eval: no score on 2 prompts")


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: list[bool], k: int) -> None:
    k = min(k, len(passed))
    subsets = list(combinations(passed, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    scored = result(tuple(float(p) for p in passed), samples=len(passed))
    assert scored.pass_at(k) == pytest.approx(share)


def test_pass_at_k_leaves_out_prompts_with_too_few_scores() -> None:
    assert result((1.0, 0.0, 0.0, 0.0), (0.0,)).pass_at(2) == 0.5
    with pytest.raises(ValueError, match="pass@5 needs 1 ≤ k ≤ 4"):
        result((1.0,)).pass_at(5)


def test_the_standard_error_is_clustered_by_prompt() -> None:
    scored = result((1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0))
    assert scored.stderr == pytest.approx(math.sqrt(0.5 / 2)), "eight samples, but only two prompts"


def test_pass_at_k_has_an_interval_over_prompts() -> None:
    scored = result((1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (1.0, 0.0, 0.0, 0.0))
    metrics = scored.metrics()
    assert metrics["eval/pass@1"] == pytest.approx(7 / 16) == scored.mean
    assert metrics["eval/pass@2"] == pytest.approx((5 / 6 + 0 + 1 + 1 / 2) / 4)
    for name in ("score", "pass@1", "pass@2", "pass@4"):
        value = metrics[f"eval/{'score' if name == 'score' else name}"]
        assert 0 <= metrics[f"eval/{name}_low"] < value < metrics[f"eval/{name}_high"] <= 1
    assert metrics["eval/score_low"] == metrics["eval/pass@1_low"], "with rewards of 0 and 1 they are the same number"


def test_rewards_beyond_the_unit_interval_get_students_interval() -> None:
    interval = result((2.0,), (4.0,), (6.0,), samples=1).interval
    assert interval is not None
    assert interval.low == pytest.approx(4 - 4.30265 * 2 / math.sqrt(3), rel=1e-4)
    assert interval.high == pytest.approx(4 + 4.30265 * 2 / math.sqrt(3), rel=1e-4)


def test_an_evaluation_of_nothing_is_refused() -> None:
    async def unused(
        prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef:
        raise AssertionError("nothing to run")

    async def main() -> None:
        with pytest.raises(PromptError, match="Evaluation 'eval' has no prompts"):
            await evaluate([], run_group=unused)

    run_virtual(main())


def test_groups_go_to_the_least_busy_worker() -> None:
    async def main() -> None:
        ran: list[int] = []

        def remote(index: int) -> RunGroup:
            async def run_group(request: GroupRequest) -> GroupRef:
                ran.append(index)
                if index == 0:
                    await asyncio.sleep(10)
                return make_ref(request.group_id)

            return run_group

        spread = LeastBusy([remote(0), remote(1)])
        async with asyncio.TaskGroup() as tasks:
            for i in range(4):
                tasks.create_task(spread(GroupRequest(prompt=Prompt(id="p"), group_id=f"g{i}", group_size=2)))
                await asyncio.sleep(1)
        assert ran == [0, 1, 1, 1]
        with pytest.raises(ValueError, match="at least one worker"):
            LeastBusy([])

    run_virtual(main())
