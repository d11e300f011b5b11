"""What scheduling itself costs, with an environment and sessions that take no time."""

from __future__ import annotations

import asyncio
import time

from miles_rollout import GroupBuffer, PromptStream, RolloutConfig, Worker, produce
from miles_tito import Ctx, EpisodeResult, Policy, Prompt
from scripted_rollout import ScriptedEnv, ScriptedSessions, graded, make_prompts


async def seconds_per_sample(*, steps: int = 10) -> float:
    """CPU seconds of this process for each trained episode, from prompt to release."""

    async def play(prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        return graded(float(ctx.episode_id.endswith("/0")))

    config = RolloutConfig(group_size=8, groups_per_step=16, max_staleness=1)
    buffer = GroupBuffer(config)
    sessions = ScriptedSessions(version=lambda: buffer.version)
    worker = Worker.from_config(config, env=ScriptedEnv(play), sessions=sessions, run_id="r")
    producer = asyncio.create_task(
        produce(
            prompts=PromptStream(make_prompts(100)),
            buffer=buffer,
            run_group=worker.run_group_ref,
            group_size=config.group_size,
        )
    )
    started = time.process_time()
    for step in range(steps):
        batch = await buffer.take()
        buffer.set_version(step + 1)
        buffer.release(batch)
    spent = time.process_time() - started
    producer.cancel()
    await asyncio.wait([producer])
    return spent / (steps * config.groups_per_step * config.group_size)


async def test_scheduling_costs_less_than_five_milliseconds_a_sample() -> None:
    assert await seconds_per_sample() < 0.005
