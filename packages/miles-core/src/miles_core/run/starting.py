"""All parts of a run, started side by side and stopped together.

trainers: model ─▶ warm-up ─▶ policy loaded ┐
workers ─▶ engines ─▶ sessions ─▶ workers   ┴─▶ the run ─▶ everything stopped
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.actors.model_folder import context_limit
from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.parts import Fleet, Parts, Sessions, Trainers, Workers, stop_parts

from .warmup import warm_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The parts of a run, ready to work."""

    trainers: Trainers
    fleet: Fleet
    sessions: Sessions
    workers: Workers
    model: Path
    """What the engines were started with: tokenizer, template and configuration are taken from here."""
    policy: Path
    """What reinforcement learning starts from: the given model, or its warmed-up child."""


@asynccontextmanager
async def started(config: Config, *, run_dir: RunDir, parts: Parts) -> AsyncGenerator[Started]:
    """Start everything; whatever happens, every part that was started is stopped."""
    to_stop = list[Any]()

    def owned(part: Any) -> Any:
        to_stop.append(part)
        return part

    try:
        trainers: Trainers = owned(parts.trainers())
        sessions: Sessions = owned(parts.sessions())
        workers: Workers = owned(parts.workers())
        given = await trainers.prepare_model(config.model, run_dir.model)
        model = await trainers.serving_folder(given, run_dir.path / "model-packed")
        fleet: Fleet = owned(parts.fleet(model))
        async with asyncio.TaskGroup() as starting:
            policy = starting.create_task(_load(config, trainers, given, run_dir))
            starting.create_task(_serve(config, fleet, sessions, workers, model))
        yield Started(
            trainers=trainers, fleet=fleet, sessions=sessions, workers=workers, model=model, policy=policy.result()
        )
    finally:
        await stop_parts(to_stop)


async def _load(config: Config, trainers: Trainers, model: Path, run_dir: RunDir) -> Path:
    """Warm up if asked to and not done by an earlier start, then load the policy for RL."""
    policy = model
    if config.sft.steps:
        policy = run_dir.checkpoints / "sft"
        if not policy.is_dir():
            await warm_up(config, trainers=trainers, model=model, run_dir=run_dir, out=policy)
            logger.info("warmed up for %d steps", config.sft.steps)
    logger.info("trainers: %s", await trainers.setup(config.train, policy))
    return policy


async def _serve(config: Config, fleet: Fleet, sessions: Sessions, workers: Workers, model: Path) -> None:
    """Engines, then the sessions in front of them, then the workers that use the sessions."""
    max_context = context_limit(config.model, model, token_budget=config.train.token_budget)
    await workers.open()  # a wrong import string shows before any engine has started
    await fleet.start()
    logger.info("engines at %s", ", ".join(fleet.urls))
    await sessions.start(fleet.url, tokenizer=model, family=config.model.family, max_context=max_context)
    await workers.connect(sessions)
