"""Ray actors: a process around a plain class each, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from miles_quant.recipe.recipe import Recipe
from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import GroupRequest
from miles_rollout.engines import AttachedServer, EngineConfig, EngineServer
from miles_rollout.engines.router import Router
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig
from ray.exceptions import ObjectLostError

from miles_core.actors.model_folder import prepare_model_folder
from miles_core.actors.rollout_worker import RolloutWorker, build_env
from miles_core.actors.session_server import SessionServer
from miles_core.actors.trainer_rank import Pushed, TrainerRank
from miles_core.config import EnvConfig, ModelConfig, SftConfig
from miles_core.durable.spool import fetch_groups
from miles_core.monitor.metering import Counters
from miles_core.run.batching import RankWork
from miles_core.run.demonstrations import SupervisedSource
from miles_core.run.loop import Trained

ENGINE_CALLS = 16
"""Calls at once on the actor of an engine or the router: some last as long as it lives."""


@ray.remote(concurrency_groups={"checkpoint": 1})  # pyright: ignore[reportCallIssue]  (Ray types the others alone)
class TrainerActor:
    """One trainer rank; waits for a checkpoint in a thread beside the one that trains."""

    def __init__(self, rank: int, recipe: Recipe | None) -> None:
        self._recipe = recipe
        self._rank = TrainerRank(rank=rank, recipe=recipe)

    def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The model folder of the run; here because builders tend to need torch, and the driver does without."""
        return prepare_model_folder(config, out=out)

    def serving_folder(self, model: Path, out: Path) -> Path:
        """What engines start from."""
        if self._recipe is None:
            return model
        from miles_core.actors.low_precision import serving_folder

        return serving_folder(self._recipe, model=model, out=out)

    def address(self) -> str:
        """Where the ranks can meet: this host and a free port."""
        from miles_tito.shared.ports import free_port

        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def setup(self, config: TrainConfig, model: Path, init_method: str | None) -> Any:
        return self._rank.setup(config=config, model=model, init_method=init_method)

    def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        self._rank.connect(engines=engines, config=config)

    def train(self, work: RankWork) -> Trained:
        return self._rank.train(work, fetch_groups(work.handles, get=ray.get, lost=(ObjectLostError,)))

    def push(self, version: int, engines: Sequence[str]) -> Pushed:
        return self._rank.push(version, engines)

    def begin_save(self, path: Path) -> None:
        self._rank.begin_save(path)

    @ray.method(concurrency_group="checkpoint")
    def finish_save(self) -> None:
        self._rank.finish_save()

    def load(self, path: Path) -> None:
        self._rank.load(path)

    def export(self, path: Path) -> None:
        self._rank.export(path)

    def export_serving(self, path: Path) -> None:
        self._rank.export_serving(path)

    def close(self) -> None:
        self._rank.close()


@ray.remote
class EngineActor:
    """Runs one SGLang server of ours, or watches one that somebody else runs."""

    def __init__(self, config: EngineConfig, index: int, model: Path, log_path: Path, port: int) -> None:
        if config.urls:
            self._server = AttachedServer(config.urls[index], start_timeout_s=config.start_timeout_s)
        else:
            self._server = EngineServer(config, model_path=model, log_path=log_path, port=port)

    async def start(self) -> str:
        """Start the server, also again after its end; returns its url, which stays the same."""
        await asyncio.to_thread(self._server.start)
        return await asyncio.to_thread(self._server.wait_ready)

    async def watch(self) -> None:
        """Returns when the server is stopped; raises EngineDied when it ends by itself."""
        await self._server.watch()

    async def log_tail(self) -> str:
        return self._server.log_tail()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)


@ray.remote
class RouterActor:
    """Runs the router in front of several engines."""

    def __init__(self, log_path: Path, port: int) -> None:
        self._router = Router(log_path=log_path, port=port)

    async def start(self) -> str:
        """Start it, also again after its end; returns its url, which stays the same."""
        return await asyncio.to_thread(self._router.start)

    async def ended(self) -> str:
        """Returns why it is gone when it is."""
        return await self._router.ended()

    async def set_workers(self, engines: Sequence[str], timeout_s: float) -> None:
        await asyncio.to_thread(partial(self._router.set_workers, list(engines), timeout_s=timeout_s))

    async def stop(self) -> None:
        await asyncio.to_thread(self._router.stop)


@ray.remote
class SessionActor:
    """One session server."""

    _server: SessionServer | None = None

    async def start(self, port: int, options: Mapping[str, Any]) -> str:
        """Serve with `options` of `SessionServer`; returns the url."""
        self._server = SessionServer(**options)
        return await self._server.start(port)

    async def ended(self) -> None:
        """Returns when it does not serve."""
        if self._server is not None:
            await self._server.ended()

    async def hold(self, is_held: bool) -> None:
        if self._server is not None:
            self._server.hold(is_held)

    async def counters(self) -> Counters:
        return Counters() if self._server is None else self._server.counters()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()


@ray.remote
class WorkerActor:
    """Runs episodes; spools each finished group, and keeps it in the object store."""

    _worker: RolloutWorker | None = None

    async def open(
        self,
        *,
        name: str,
        env: EnvConfig,
        config: RolloutConfig,
        num_workers: int,
        run_id: str,
        trajectories: Path | None,
    ) -> None:
        """Build the environment. Not in `__init__`: what that raises reaches nobody but as text."""
        self._worker = RolloutWorker(
            name=name,
            env=build_env(env),
            config=config,
            num_workers=num_workers,
            run_id=run_id,
            trajectories=trajectories,
            store=ray.put,
        )

    async def connect(self, sessions: Sequence[str], api_key: str) -> None:
        self._opened().connect(sessions, api_key=api_key)

    async def hold(self, is_held: bool) -> None:
        if self._worker is not None:
            self._worker.hold(is_held)

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return self._opened().prompts(split, limit)

    async def run_group(self, request: GroupRequest) -> GroupRef:
        return await self._opened().run_group(request)

    async def evaluate_group(self, request: GroupRequest, folder: Path | None) -> GroupRef:
        return await self._opened().evaluate_group(request, folder=folder)

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()

    def _opened(self) -> RolloutWorker:
        assert self._worker is not None, "open() comes first"
        return self._worker


@ray.remote
class SupervisedActor:
    """Turns demonstrations into groups for SFT."""

    _source: SupervisedSource | None = None

    def open(self, config: SftConfig, *, tokenizer: Path, family: str, seed: int, skip: int) -> dict[str, Any]:
        """Load and tokenize the demonstrations; the first `skip` draws are left out. Returns their fingerprint."""
        self._source = SupervisedSource(config, tokenizer=tokenizer, family=family, seed=seed, store=ray.put)
        self._source.skip(skip)
        return self._source.fingerprint()

    def run_group(self, request: GroupRequest) -> GroupRef:
        assert self._source is not None, "open() comes first"
        return self._source.group(request)
