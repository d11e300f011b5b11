"""The whole schedule under generated timings: ages, credits, sizes and fates hold, and nothing deadlocks.

Everything runs in virtual time, so one example costs milliseconds and a deadlock is an error at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_rollout import (
    MASKED_EPISODES,
    EmptyBatchesError,
    Fate,
    FateEvent,
    GroupBuffer,
    GroupRequest,
    PromptStream,
    RolloutConfig,
    produce,
)
from miles_tito import GroupRef
from scripted_rollout import make_config, make_prompts, make_ref, run_virtual

STEPS = 6

SPREAD, FLAT, FAILED = (0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, None, None)


@dataclass(frozen=True, kw_only=True)
class Script:
    """How long each group, training and push take, and what the groups are worth; lists are repeated."""

    group_s: list[float]
    rewards: list[tuple[float | None, ...]]
    train_s: list[float]
    push_s: float
    lags: list[float]
    """Part of a group's time after which its last sibling starts, so that siblings have different versions."""


scripts = st.builds(
    Script,
    group_s=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 8.0, 30.0]), min_size=1, max_size=13),
    rewards=st.lists(st.sampled_from([SPREAD, SPREAD, SPREAD, FLAT, FAILED]), min_size=1, max_size=11),
    train_s=st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=1, max_size=5),
    push_s=st.sampled_from([0.0, 0.25]),
    lags=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7),
)


@dataclass(kw_only=True)
class Run:
    """A scripted engine, trainer and producer around a real buffer, and everything that was seen."""

    config: RolloutConfig
    script: Script
    engine_version: int = 0
    batches: list[tuple[int, list[GroupRef]]] = field(default_factory=list)
    """Version that each batch was trained from, and its groups."""
    events: list[FateEvent] = field(default_factory=list)
    prompts_issued: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.buffer = GroupBuffer(self.config, observer=self.observe)

    def observe(self, event: FateEvent) -> None:
        self.events.append(event)
        if event.fate is Fate.IN_FLIGHT:
            self.prompts_issued[event.prompt_id] += 1

    def check(self) -> None:
        """What holds at every moment."""
        counts = self.buffer.counts()
        assert counts.lost == 0
        assert counts.twice == 0
        assert self.buffer.credits_used <= (self.config.max_staleness + 1) * self.config.groups_per_step

    async def run_group(self, request: GroupRequest) -> GroupRef:
        self.check()
        number = int(request.group_id[1:])
        seconds = self.script.group_s[number % len(self.script.group_s)]
        lag = self.script.lags[number % len(self.script.lags)]
        first = self.engine_version
        await asyncio.sleep(seconds * lag)
        last = self.engine_version
        await asyncio.sleep(seconds * (1 - lag))
        self.check()
        rewards = self.script.rewards[number % len(self.script.rewards)]
        return make_ref(request.group_id, rewards, prompt_id=request.prompt.id, versions=[first, last, last])

    async def train(self, steps: int) -> None:
        for step in range(steps):
            batch = await self.buffer.take()
            self.check()
            self.batches.append((self.buffer.version, batch))
            await asyncio.sleep(self.script.train_s[step % len(self.script.train_s)])
            self.engine_version += 1  # the engines are ahead of the driver for a moment
            await asyncio.sleep(self.script.push_s)
            self.buffer.set_version(self.engine_version)
            self.buffer.release(batch)
            self.check()

    async def all(self, steps: int = STEPS) -> None:
        stream = PromptStream(make_prompts(7), seed=1)
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(
                produce(
                    prompts=stream,
                    buffer=self.buffer,
                    run_group=self.run_group,
                    group_size=self.config.group_size,
                )
            )
            await self.train(steps)
            producer.cancel()
        self.buffer.close()

    def finish(self, *, at: float | None = None) -> None:
        """Run to the end, or to a cancellation `at` a moment; all filtered is a fair end too."""

        async def main() -> None:
            try:
                async with asyncio.timeout(at):
                    await self.all()
            except* (EmptyBatchesError, TimeoutError):
                self.buffer.close()

        run_virtual(main())

    def ages(self) -> list[int]:
        """Versions that each trained episode was behind the weights it trained."""
        return [
            version - episode.oldest_version
            for version, batch in self.batches
            for ref in batch
            for episode in ref.episodes
            if episode.oldest_version is not None and episode.id not in ref.metadata.get(MASKED_EPISODES, ())
        ]


configs = st.builds(
    lambda staleness, batch, policy, put, stragglers: make_config(
        group_size=3,
        groups_per_step=batch,
        max_staleness=staleness,
        put_policy=put,
        take_policy=policy,
        stragglers=stragglers,
        max_empty_batches=6,
        max_failure_rate=1.0,
    ),
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    policy=st.sampled_from(["drop", "retry", "mask"]),
    put=st.sampled_from(["keep", "drop", "retry", "mask"]),
    stragglers=st.sampled_from(["overtake", "wait"]),
)

many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(configs, scripts)
def test_no_trained_token_is_older_than_the_configured_staleness(config: RolloutConfig, script: Script) -> None:
    run = Run(config=config, script=script)
    run.finish()
    assert max(run.ages(), default=0) <= config.max_staleness


@many
@given(configs, scripts)
def test_every_batch_is_full_and_no_group_is_trained_twice(config: RolloutConfig, script: Script) -> None:
    run = Run(config=config, script=script)
    run.finish()
    assert {len(batch) for _, batch in run.batches} <= {config.groups_per_step}
    trained = [ref.id for _, batch in run.batches for ref in batch]
    assert len(set(trained)) == len(trained)


@many
@given(configs, scripts, st.one_of(st.none(), st.floats(0.0, 40.0)))
def test_every_issued_group_has_one_final_fate_however_the_run_ends(
    config: RolloutConfig, script: Script, cancelled_at: float | None
) -> None:
    run = Run(config=config, script=script)
    run.finish(at=cancelled_at)
    final = Counter(event.group_id for event in run.events if event.fate.is_final)
    issued = [event.group_id for event in run.events if event.fate is Fate.IN_FLIGHT]
    assert set(final) == set(issued)
    assert set(final.values()) <= {1}
    assert ", in flight 0: 0 lost, 0 twice" in run.buffer.proof()
    assert run.buffer.credits_used == 0


@many
@given(configs, scripts)
def test_a_batch_that_waits_for_stragglers_loses_no_group_to_age(config: RolloutConfig, script: Script) -> None:
    config = make_config(
        group_size=3,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        stragglers="wait",
        max_empty_batches=6,
        max_failure_rate=1.0,
    )
    run = Run(config=config, script=script)
    run.finish()
    assert run.buffer.counts().stale == 0


@many
@given(configs, scripts)
def test_a_run_that_is_not_all_filtered_makes_all_its_steps(config: RolloutConfig, script: Script) -> None:
    if SPREAD not in script.rewards:
        script = Script(**{**script.__dict__, "rewards": [*script.rewards, SPREAD]})
    run = Run(config=config, script=script)
    run.finish()
    stopped = run.buffer.counts().filtered + run.buffer.counts().failed >= 6 * config.groups_per_step
    assert len(run.batches) == STEPS or stopped


@many
@given(scripts, st.integers(0, 3), st.integers(1, 4))
def test_retried_prompts_are_issued_again_as_often_as_their_groups_were_stale(
    script: Script, staleness: int, batch: int
) -> None:
    config = make_config(
        group_size=3,
        groups_per_step=batch,
        max_staleness=staleness,
        put_policy="retry",
        take_policy="retry",
        group_retries=10**6,
        max_empty_batches=6,
        max_failure_rate=1.0,
    )
    run = Run(config=config, script=script)
    run.finish()
    stale = [event.group_id for event in run.events if event.fate is Fate.STALE]
    retried = [event.retry_of for event in run.events if event.retry_of is not None]
    assert retried == stale[: len(retried)], "in the order that they became stale, each once"


def test_dropping_stragglers_loses_the_long_groups_and_waiting_keeps_them() -> None:
    """The bias that the module text of `buffer` warns of, in numbers."""
    script = Script(group_s=[1.0, 1.0, 1.0, 12.0], rewards=[SPREAD], train_s=[1.0], push_s=0.0, lags=[0.0])
    share: dict[str, float] = {}
    for stragglers in ("overtake", "wait"):
        run = Run(config=make_config(group_size=3, groups_per_step=2, stragglers=stragglers), script=script)
        run_virtual(run.all(steps=40))
        trained = [int(ref.id[1:]) for _, batch in run.batches for ref in batch]
        share[stragglers] = sum(number % 4 == 3 for number in trained) / len(trained)
    assert share["overtake"] < 0.02
    assert share["wait"] == pytest.approx(0.25, abs=0.02)
