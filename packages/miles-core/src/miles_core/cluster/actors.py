"""Ray actors: a process around a plain class each, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from miles_rollout.config import RolloutConfig
from miles_rollout.engines import AttachedServer, EngineConfig, EngineServer
from miles_rollout.router import Router
from miles_tito.records import Prompt, Sampling
from miles_tito.summary import GroupRef
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig
from ray.exceptions import ObjectLostError

from miles_core.batching import RankWork
from miles_core.config import EnvConfig, ModelConfig, SftConfig
from miles_core.loop import Trained
from miles_core.metering import Counters
from miles_core.model import prepare_model_folder
from miles_core.rank import TrainerRank
from miles_core.serving import SessionServer
from miles_core.spool import fetch_groups
from miles_core.supervised import SupervisedSource
from miles_core.workers import RolloutWorker, build_env


@ray.remote
class TrainerActor:
    """One trainer rank."""

    def __init__(self, rank: int) -> None:
        self._rank = TrainerRank(rank=rank)

    def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The model folder of the run; here because builders tend to need torch, and the driver does without."""
        return prepare_model_folder(config, out=out)

    def address(self) -> str:
        """Where the ranks can meet: this host and a free port."""
        from miles_train.fsdp.ranks import free_port

        return f"tcp://{ray.util.get_node_ip_address()}:{free_port()}"

    def setup(self, config: TrainConfig, model: Path, init_method: str | None) -> Any:
        return self._rank.setup(config=config, model=model, init_method=init_method)

    def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        self._rank.connect(engines=engines, config=config)

    def train(self, work: RankWork) -> Trained:
        return self._rank.train(work, fetch_groups(work.handles, get=ray.get, lost=(ObjectLostError,)))

    def push(self, version: int) -> dict[str, float]:
        return self._rank.push(version)

    def export(self, path: Path) -> None:
        self._rank.export(path)

    def close(self) -> None:
        self._rank.close()


@ray.remote
class EngineActor:
    """Supervises one SGLang server of ours, or watches one that somebody else runs."""

    def __init__(self, config: EngineConfig, index: int, model: Path, log_path: Path) -> None:
        if config.urls:
            self._server = AttachedServer(config.urls[index], start_timeout_s=config.start_timeout_s)
        else:
            self._server = EngineServer(config, model_path=model, log_path=log_path)

    async def start(self) -> str:
        await asyncio.to_thread(self._server.start)
        return await asyncio.to_thread(self._server.wait_ready)

    async def watch(self) -> None:
        """Returns when the server is stopped; raises EngineDied when it ends by itself."""
        await self._server.watch()

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)


@ray.remote
class RouterActor:
    """Supervises the router in front of several engines."""

    def __init__(self, log_path: Path) -> None:
        self._router = Router(log_path=log_path)

    async def start(self, engines: Sequence[str]) -> str:
        return await asyncio.to_thread(self._router.start, list(engines))

    async def stop(self) -> None:
        await asyncio.to_thread(self._router.stop)


@ray.remote
class SessionActor:
    """One session server."""

    _server: SessionServer | None = None

    async def start(
        self, engine_url: str, *, tokenizer: Path, family: str, model: str, max_context: int, api_key: str
    ) -> str:
        self._server = SessionServer(
            engine_url, tokenizer=tokenizer, family=family, model=model, max_context=max_context, api_key=api_key
        )
        return await self._server.start()

    async def counters(self) -> Counters:
        assert self._server is not None, "start() comes first"
        return self._server.counters()

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
        trajectories: Path,
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

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return self._opened().prompts(split, limit)

    async def run_group(
        self, prompt: Prompt, group_id: str, group_size: int, attempt: int, sampling: Sampling | None, spool: bool
    ) -> GroupRef:
        return await self._opened().run_group(
            prompt, group_id=group_id, group_size=group_size, attempt=attempt, sampling=sampling, spool=spool
        )

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

    def open(self, config: SftConfig, *, tokenizer: Path, family: str, seed: int) -> None:
        """Load and tokenize the demonstrations."""
        self._source = SupervisedSource(config, tokenizer=tokenizer, family=family, seed=seed, store=ray.put)

    def run_group(self, prompt: Prompt, group_id: str, group_size: int) -> GroupRef:
        assert self._source is not None, "open() comes first"
        return self._source.group(prompt, group_id=group_id, group_size=group_size)
