"""Engines of their own for evaluation, with a router, a session server and a worker that training does not use."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from miles_rollout.dispatch import RunGroup
from miles_rollout.engines import EngineControl

from miles_core.actors.model_folder import context_limit
from miles_core.config import Config
from miles_core.durable.rundir import RunDir

from .fleet import EngineFleet
from .remote import OnEvent, stop_together
from .sessions import SessionServers
from .workers import RolloutWorkers


class EvalEngines:
    """Engines with `role = "eval"`, with a router, a session server and a worker that training does not use.

    Nothing here is started again by itself: an evaluation that fails stops all of it, and the next one begins anew.
    """

    def __init__(self, config: Config, *, run_dir: RunDir, model: Path, on_event: OnEvent) -> None:
        name, engines = next((n, e) for n, e in config.engines.items() if e.role == "eval")
        self._config = config
        self._model = model
        one_worker = replace(config, workers=replace(config.workers, count=1))
        self._workers = RolloutWorkers(one_worker, run_dir=run_dir, on_event=on_event, evaluates_only=True)
        self._sessions = SessionServers(1, state=run_dir.path / "sessions-eval", on_event=on_event)
        self._fleet = EngineFleet(
            name,
            engines,
            model=model,
            log=run_dir.log,
            sessions=self._sessions,
            workers=self._workers,
            sync=_never,
            on_event=on_event,
        )

    async def start(self) -> None:
        """Start all of it at once, on whatever weights; raises what keeps it from serving."""
        config = self._config
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._fleet.start())
            starting.create_task(self._workers.open())
        max_context = context_limit(config.model, self._model, token_budget=config.train.token_budget)
        await self._sessions.start(
            self._fleet.url,
            engines=self._fleet.urls,
            tokenizer=self._model,
            family=config.model.family,
            max_context=max_context,
        )
        await self._workers.connect(self._sessions)

    async def load(self, snapshot: Path, version: int) -> None:
        """Put the weights of `snapshot` into every engine; their tokens carry `version` from then on."""
        async with asyncio.TaskGroup() as loading:
            for url in self._fleet.urls:
                loading.create_task(_load(url, snapshot, version))

    def run_group_into(self, folder: Path | None) -> RunGroup:
        """Runs groups on these engines and writes them to `folder`."""
        return self._workers.evaluate_into(folder)

    async def stop(self) -> None:
        """End all of it; also what has only half started."""
        await stop_together([self._fleet, self._sessions, self._workers])


async def _load(url: str, snapshot: Path, version: int) -> None:
    async with EngineControl(url) as engine:
        await engine.load_weights(snapshot, version=version)


async def _never(url: str) -> int:
    raise AssertionError(f"nobody supervises the engines of an evaluation, {url} among them")
