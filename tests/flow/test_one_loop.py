"""The one loop of miles-core around real workers, buffer and batch planning, with a scripted engine and trainer.

Virtual time: hours of episodes cost milliseconds, and a deadlock is an error at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_core.batching import AdvantagesByEpisode, Trained, plan_ranks
from miles_core.monitor import RunSummary
from miles_core.run import loop
from miles_rollout import (
    BufferClosedError,
    Fate,
    FateEvent,
    GroupBuffer,
    PromptStream,
    RolloutConfig,
    Worker,
    advantages_by_episode,
    produce,
)
from miles_tito import Ctx, EpisodeResult, Policy, Prompt
from miles_tito.records.summary import GroupRef
from scripted_rollout import ScriptedEnv, ScriptedSessions, graded, make_prompts, run_virtual

RANKS = 2


@dataclass(kw_only=True)
class ScriptedTrainer:
    """Two ranks that only look at what they were given; also the engines and the monitor of the run."""

    sessions: ScriptedSessions
    step_s: float = 1.0
    broken: str = ""
    version: int = 0
    ages: list[int] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    logged: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    async def train(self, groups: Sequence[GroupRef], *, advantages: AdvantagesByEpisode) -> Trained:
        work = plan_ranks(groups, advantages=advantages, token_budget=64, ranks=RANKS, minibatches=1)
        assert len({len(step.micro_batches) for rank in work for step in rank.steps}) == 1, "a rank would wait for ever"
        for rank in work:
            for row in (row for step in rank.steps for rows in step.micro_batches for row in rows):
                episode = rank.handles[row.group].episodes[row.episode]
                self.trained.append(episode.trajectories[row.trajectory].id)
                self.ages.append(self.version - episode.oldest_version)
        await asyncio.sleep(self.step_s)
        if self.broken == "train" and self.version == 2:
            raise FloatingPointError("the loss is nan")
        return Trained(version=self.version + 1, metrics={})

    async def push(self, version: int) -> dict[str, float]:
        if self.broken == "push" and version == 3:
            raise ConnectionError("an engine refused the weights")
        self.version = version
        await asyncio.sleep(0.1)
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.broken == "log" and step == 3:
            raise OSError("no space left for metrics")
        self.logged.append((step, dict(metrics)))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        return None

    def rewind(self, step: int) -> None:
        return None

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        return None

    def finish(self, summary: RunSummary) -> None:
        return None


@dataclass(kw_only=True)
class Flow:
    """A whole run; episodes take their seconds from `episode_s` and fail where it says None.

    `broken` is the part that breaks: train, push, on_step, log, spool, ledger, prompts.
    """

    config: RolloutConfig
    episode_s: Sequence[float | None]
    steps: int = 5
    broken: str = ""

    def __post_init__(self) -> None:
        self.sessions = ScriptedSessions(version=lambda: self.trainer.version)
        self.trainer = ScriptedTrainer(sessions=self.sessions, broken=self.broken)
        self.buffer = GroupBuffer(self.config, observer=self.observe)
        self.env = ScriptedEnv(self.play)
        self.final: list[str] = []
        self._episodes = 0

    def observe(self, event: FateEvent) -> None:
        if event.fate.is_final:
            self.final.append(event.group_id)
        if self.broken == "ledger" and event.fate is Fate.BUFFERED and event.version == 2:
            raise OSError("no space left for the index")

    async def spool(self, ref: GroupRef) -> None:
        await asyncio.sleep(0)
        if self.broken == "spool" and self.buffer.version == 2:
            raise OSError("no space left for a group")

    async def on_step(self, version: int, groups: Sequence[GroupRef], metrics: dict[str, float]) -> dict[str, float]:
        if self.broken == "on_step" and version == 3:
            raise RuntimeError("the evaluation broke")
        return {"eval/done": float(version)}

    async def play(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        seconds = self.episode_s[self._episodes % len(self.episode_s)]
        self._episodes += 1
        if seconds is None:
            raise ConnectionError("the sandbox is gone")
        await asyncio.sleep(seconds)
        return graded(float(ctx.episode_id.endswith("/0")))

    async def run(self) -> None:
        worker = Worker.from_config(self.config, env=self.env, sessions=self.sessions, run_id="flow")
        try:
            await loop.run(
                produce=partial(
                    produce,
                    prompts=PromptStream(iter(make_prompts(7)) if self.broken == "prompts" else make_prompts(5)),
                    buffer=self.buffer,
                    run_group=worker.run_group_ref,
                    group_size=self.config.group_size,
                    spool=self.spool,
                ),
                buffer=self.buffer,
                train=partial(
                    self.trainer.train, advantages=partial(advantages_by_episode, advantage=self.config.advantage)
                ),
                push=self.trainer.push,
                monitor=self.trainer,  # pyright: ignore[reportArgumentType]  (made by hand, not by `build_monitor`)
                steps=self.steps,
                on_step=self.on_step,
            )
        finally:
            self.buffer.close()


def make_flow(
    *,
    episode_s: Sequence[float | None] = (1.0,),
    max_staleness: int = 1,
    groups_per_step: int = 2,
    broken: str = "",
) -> Flow:
    config = RolloutConfig(
        group_size=3,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        max_concurrent_episodes=7,
        max_failure_rate=1.0,
        episode_timeout_s=50.0,
    )
    return Flow(config=config, episode_s=episode_s, broken=broken)


def check_nothing_is_left(flow: Flow) -> None:
    """However a run ended: every group has one fate, and no episode runs on."""
    assert ", in flight 0: 0 lost, 0 twice" in flow.buffer.proof()
    assert len(flow.final) == len(set(flow.final)) == flow.buffer.counts().issued
    assert flow.buffer.credits_used == 0
    assert flow.env.running == 0
    assert not flow.sessions.live, "every session was closed"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 3.0, 12.0, 70.0, None]), min_size=1, max_size=17),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_the_loop_trains_fresh_samples_once_and_accounts_for_every_group(
    episode_s: list[float | None], max_staleness: int, groups_per_step: int
) -> None:
    flow = make_flow(
        episode_s=[*episode_s, 1.0, 1.0, 1.0], max_staleness=max_staleness, groups_per_step=groups_per_step
    )
    run_virtual(flow.run())
    assert [step for step, _ in flow.trainer.logged] == [1, 2, 3, 4, 5]
    assert max(flow.trainer.ages) <= max_staleness
    assert len(set(flow.trainer.trained)) == len(flow.trainer.trained)
    assert flow.buffer.counts().trained == 5 * groups_per_step
    assert flow.env.most_running <= 7
    check_nothing_is_left(flow)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize(
    ("broken", "error", "message", "committed"),
    [
        ("train", FloatingPointError, "the loss is nan", 2),
        ("push", ConnectionError, "an engine refused the weights", 2),
        ("on_step", RuntimeError, "the evaluation broke", 3),
        ("log", OSError, "no space left for metrics", 3),
        ("spool", OSError, "no space left for a group", 2),
        ("ledger", OSError, "no space left for the index", 2),
        ("prompts", BufferClosedError, "The iterator of prompts ended after 7", 3),
    ],
)
def test_a_broken_part_ends_the_run_with_its_error_and_leaves_nothing_running(
    broken: str, error: type[Exception], message: str, committed: int, max_staleness: int
) -> None:
    flow = make_flow(broken=broken, max_staleness=max_staleness)
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(flow.run())
    assert {type(each) for each in leaves(caught.value)} == {error}
    assert all(message in str(each) for each in leaves(caught.value))
    assert flow.buffer.counts().trained == 2 * committed
    assert [step for step, _ in flow.trainer.logged] == [1, 2, 3][: 2 if broken in ("on_step", "log") else committed]
    check_nothing_is_left(flow)


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf for each in group.exceptions for leaf in (leaves(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]


@settings(max_examples=40, deadline=None)
@given(st.floats(0.0, 16.0), st.integers(0, 2))
def test_a_run_that_is_cancelled_at_any_moment_accounts_for_every_group(seconds: float, max_staleness: int) -> None:
    flow = make_flow(max_staleness=max_staleness, episode_s=[0.5, 1.0, 6.0])

    async def main() -> None:
        task = asyncio.create_task(flow.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None

    run_virtual(main())
    check_nothing_is_left(flow)
    steps = [step for step, _ in flow.trainer.logged]
    assert steps == list(range(1, len(steps) + 1))
    assert flow.buffer.counts().trained == 2 * len(steps), "what is logged is committed, and the other way round"


def test_asynchronous_training_overlaps_episodes_and_steps() -> None:
    async def seconds(max_staleness: int) -> float:
        flow = make_flow(max_staleness=max_staleness)
        flow.steps = 20
        await flow.run()
        return asyncio.get_running_loop().time()

    synchronous, asynchronous = run_virtual(seconds(0)), run_virtual(seconds(1))
    assert synchronous == pytest.approx(20 * 2.1, abs=0.2), "an episode, a step and a push, one after the other"
    assert asynchronous < 0.6 * synchronous + 2
