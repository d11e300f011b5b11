"""What a seed's run is like: limits and policies drawn by the seed, or the user's own with the run cut short."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from miles_core.config import CheckpointConfig, Config, EvalConfig, RunConfig, WorkersConfig
from miles_core.monitor.config import MonitorConfig
from miles_rollout.config import RolloutConfig
from miles_rollout.engines import EngineConfig, HealthConfig
from miles_tito.records import Sampling
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig

MOST_STEPS = 8
"""Steps of a user's run that are played."""
TOKEN_BUDGET = 512
EPISODE_TIMEOUT_S = 200.0
NUM_ENGINES = 2
NUM_PROMPTS = 11
"""Few, so that a small run has several epochs."""
HEALTH = HealthConfig(
    probe_interval_s=10.0, progress_interval_s=30.0, dead_after_s=40.0, max_restarts=20, backoff_s=2.0
)


def draw_config(seed: int) -> Config:
    """A small run: a few steps of a few groups, with any combination of policies."""
    dice = random.Random(f"chaos config/{seed}")
    groups_per_step = dice.randint(1, 3)
    stragglers: Literal["wait", "overtake"] = dice.choice(["wait", "wait", "overtake"])
    policy = dice.choice(["mask", "drop", "retry"])
    rollout = RolloutConfig(
        group_size=dice.randint(2, 3),
        groups_per_step=groups_per_step,
        max_staleness=dice.choice([0, 1, 1, 2, 3]),
        stragglers=stragglers,
        oversampling=dice.choice([1.0, 1.5]) if stragglers == "overtake" else 1.0,
        max_concurrent_episodes=dice.choice([4, 8, 64]),
        put_policy=policy,
        take_policy=policy,
        partial=dice.choice(["train", "mask"]),
        filter=dice.choice(["nonzero_spread", "no_filter"]),
        retries=dice.randint(0, 1),
        failure_policy=dice.choice(["keep", "drop", "retry"]),
        group_retries=dice.randint(0, 2),
    )
    config = Config(
        run=RunConfig(name="chaos", steps=dice.randint(4, MOST_STEPS), seed=seed),
        rollout=rollout,
        sync=PushConfig(pause=dice.choice(["retract", "in_place", "abort"])),
        workers=WorkersConfig(count=dice.randint(1, 2)),
        checkpoint=CheckpointConfig(every=dice.randint(1, 4), keep=dice.randint(1, 2)),
        train=TrainConfig(ranks=dice.randint(1, 2)),
        eval=EvalConfig(
            every=dice.choice([0, 0, 2, 3]), at_start=dice.random() < 0.3, at_end=dice.random() < 0.3, num_prompts=2
        ),
    )
    return playable(config)


def playable(config: Config) -> Config:
    """`config` with what a scripted run cannot have taken out of it, and as long as it takes to see everything."""
    rollout = replace(
        config.rollout,
        episode_timeout_s=EPISODE_TIMEOUT_S,
        max_failure_rate=1.0,  # faults are meant to happen
        max_empty_batches=1000,
        sampling=Sampling(max_tokens=64),
    )
    return replace(
        config,
        run=replace(config.run, steps=min(config.run.steps, MOST_STEPS)),
        rollout=rollout,
        train=replace(config.train, device="cpu", token_budget=TOKEN_BUDGET),
        engines={"rollout": EngineConfig(device="cpu", count=NUM_ENGINES, health=HEALTH)},
        eval=config.eval if config.eval.mode == "shared" else EvalConfig(at_start=False, at_end=False),
        sft=replace(config.sft, steps=0),
        monitor=MonitorConfig(console="off", trace=False),
    )


def num_prompts(config: Config) -> int:
    return config.env.num_prompts or NUM_PROMPTS
