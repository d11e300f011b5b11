"""Every process of an RL run, started side by side and stopped together.

trainers: model ─▶ warm-up ─▶ policy loaded ┐
workers ─▶ engines ─▶ sessions ─▶ workers   ┴─▶ the run ─▶ everything stopped
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from miles_rollout.engines import EngineConfig
from miles_weightsync.config import LOADER, PushConfig

from miles_core.actors.model_folder import context_limit
from miles_core.cluster import EngineFleet, OnEvent, RolloutWorkers, SessionServers, TrainerRanks, stop_together
from miles_core.cluster.remote import Stoppable
from miles_core.config import Config
from miles_core.durable.rundir import RunDir

from .sft import warm_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The processes of a run, ready to work."""

    trainers: TrainerRanks
    fleet: EngineFleet
    sessions: SessionServers
    workers: RolloutWorkers
    model: Path
    """What the engines were started with: tokenizer, template and configuration are taken from here."""
    policy: Path
    """What reinforcement learning starts from: the given model, or its warmed-up child."""


@asynccontextmanager
async def started(config: Config, *, run_dir: RunDir, on_event: OnEvent) -> AsyncGenerator[Started]:
    """Start everything; whatever happens, everything that was started is stopped.

    Args:
        on_event: called with what happens to the processes.
    """
    trainers = TrainerRanks(config.train, config.quant)
    sessions = SessionServers(config.sessions.count, state=run_dir.path / "sessions", on_event=on_event)
    workers = RolloutWorkers(config, run_dir=run_dir, on_event=on_event)
    to_stop: list[Stoppable] = [trainers, sessions, workers]
    try:
        given = await trainers.prepare_model(config.model, run_dir.model)
        model = await trainers.serving_folder(given, run_dir.path / "model-packed")
        name, engines = next((n, e) for n, e in config.engines.items() if e.role == "rollout")
        fleet = EngineFleet(
            name,
            with_receiver(engines, config.sync),
            model=model,
            log=run_dir.log,
            sessions=sessions,
            workers=workers,
            sync=trainers.sync,
            on_event=on_event,
        )
        to_stop.append(fleet)
        async with asyncio.TaskGroup() as starting:
            policy = starting.create_task(_load(config, trainers, given, run_dir))
            starting.create_task(_serve(config, fleet, sessions, workers, model))
        yield Started(
            trainers=trainers, fleet=fleet, sessions=sessions, workers=workers, model=model, policy=policy.result()
        )
    finally:
        await stop_together(to_stop)


def with_receiver(engines: EngineConfig, sync: PushConfig) -> EngineConfig:
    """Engines as `sync` needs them to be started; those that run already must have been started so."""
    if sync.way != "staged" or engines.urls:
        return engines
    given = engines.options.get("custom-weight-loader", ())
    loaders = [*given] if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return replace(engines, options={**engines.options, "custom-weight-loader": [*loaders, LOADER]})


async def _load(config: Config, trainers: TrainerRanks, model: Path, run_dir: RunDir) -> Path:
    """Warm up if asked to and not done by an earlier start, then load the policy for RL."""
    policy = model
    if config.sft.steps:
        policy = run_dir.checkpoints / "sft"
        if not policy.is_dir():
            await warm_up(config, trainers=trainers, model=model, run_dir=run_dir, out=policy)
            logger.info("warmed up for %d steps", config.sft.steps)
    logger.info("trainers: %s", await trainers.setup(config.train, policy))
    return policy


async def _serve(
    config: Config, fleet: EngineFleet, sessions: SessionServers, workers: RolloutWorkers, model: Path
) -> None:
    """Engines, then the sessions in front of them, then the workers that use the sessions."""
    max_context = context_limit(config.model, model, token_budget=config.train.token_budget)
    await workers.open()  # a wrong import string shows before any engine has started
    await fleet.start()
    logger.info("engines at %s", ", ".join(fleet.urls))
    await sessions.start(
        fleet.url, engines=fleet.urls, tokenizer=model, family=config.model.family, max_context=max_context
    )
    await workers.connect(sessions)
