"""The driver's hands on the cluster: Ray up and down, and one object for each kind of actor.

trainers ── TrainerActor x ranks          fleet ── EngineActor x engines, RouterActor when more than one
sessions ── SessionActor x n              workers ── WorkerActor x n
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from miles_rollout.dispatch import LeastBusy
from miles_rollout.engines import EngineConfig, resolve_device
from miles_tito.records import Prompt, Sampling
from miles_tito.summary import GroupRef
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig
from miles_weightsync.errors import SyncError

from . import actors
from .batching import AdvantagesByEpisode, RankWork, plan_ranks
from .config import Config, ModelConfig, RayConfig
from .loop import Trained
from .metering import Counters
from .rundir import RunDir

logger = logging.getLogger(__name__)

STOP_S = 8.0
"""Every part of a run ends within this, or is killed."""


@asynccontextmanager
async def cluster(config: RayConfig) -> AsyncIterator[None]:
    """Ray for the duration of a run: started here, or joined at `config.address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Threads that spin while they wait take the cores from the engine, which runs on the same ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ray's default of 15 would also slow the engines, whose processes are children of an actor.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"log_to_driver": config.log_to_driver, "logging_level": logging.ERROR}
    if config.address is None:
        # The dashboard costs seconds to start and nothing here reads it.
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        if config.num_cpus is not None:
            options["num_cpus"] = config.num_cpus
        if config.object_store_bytes is not None:
            options["object_store_memory"] = config.object_store_bytes
    else:
        options["address"] = config.address
    starting = asyncio.ensure_future(asyncio.to_thread(ray.init, **options))
    try:
        await asyncio.shield(starting)
        yield
    finally:
        await asyncio.wait([starting])  # Ray cannot be interrupted while it starts, and must not be left running
        await asyncio.to_thread(ray.shutdown)


def spawn(
    actor: Any, *, threads: int | None = None, num_gpus: int = 0, concurrency: int | None = None
) -> Callable[..., Any]:
    """How to make one `actor`: call the result with its arguments. CPUs are not reserved: on a small machine every
    actor shares them."""
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": num_gpus}
    if threads is not None:
        options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
    if concurrency is not None:
        options["max_concurrency"] = concurrency
    return actor.options(**options).remote


async def stop_parts(parts: Sequence[Any]) -> None:
    """Stop every part at once; none keeps the others waiting, and none raises."""
    results = await asyncio.gather(*(part.stop() for part in parts), return_exceptions=True)
    for part, result in zip(parts, results, strict=True):
        if isinstance(result, BaseException):
            logger.warning("%s did not stop cleanly: %s: %s", type(part).__name__, type(result).__name__, result)


async def _stop_all(handles: Sequence[Any], *, what: str) -> None:
    """Ask every actor to stop, wait a bounded time, then kill."""
    if not handles:
        return
    done = asyncio.gather(*(handle.stop.remote() for handle in handles), return_exceptions=True)
    try:
        async with asyncio.timeout(STOP_S):
            for result in await done:
                if isinstance(result, Exception):
                    logger.warning("a %s did not stop cleanly: %s", what, result)
    except TimeoutError:
        logger.warning("%d %ss did not stop within %.0f s and are killed", len(handles), what, STOP_S)
    for handle in handles:
        ray.kill(handle)


class Trainers:
    """Every trainer rank, driven together."""

    def __init__(self, config: TrainConfig) -> None:
        gpus = 1 if resolve_device(config.device) == "cuda" else 0
        make = spawn(actors.TrainerActor, threads=config.threads, num_gpus=gpus)
        self._actors = [make(rank) for rank in range(config.ranks)]
        self._config = config

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The given model folder, or the one that `model.builder` makes.

        Raises:
            ModelError: there is no usable folder.
        """
        return await self._actors[0].prepare_model.remote(config, out)

    async def setup(self, config: TrainConfig, model: Path) -> Any:
        """Load `model` into every rank; returns rank 0's layout. May be called again for another model or loss."""
        self._config = config
        init_method = await self._actors[0].address.remote() if config.ranks > 1 else None
        return (await self._all("setup", config, model, init_method))[0]

    async def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        await self._all("connect", list(engines), config)

    def plan(self, groups: Sequence[GroupRef], advantages: AdvantagesByEpisode) -> list[RankWork]:
        return plan_ranks(
            groups,
            advantages=advantages,
            token_budget=self._config.token_budget,
            ranks=self._config.ranks,
            minibatches=self._config.minibatches,
        )

    async def train(self, work: Sequence[RankWork]) -> Trained:
        results = await asyncio.gather(
            *(actor.train.remote(part) for actor, part in zip(self._actors, work, strict=True))
        )
        return results[0]

    async def push(self, version: int) -> dict[str, float]:
        """Every rank sends its own shards; returns rank 0's report as metrics.

        A failed push leaves its engines paused, so no token comes from mixed weights, and is tried once more: that
        is what brings them back.

        Raises:
            SyncError: the second try failed as well.
        """
        try:
            return (await self._all("push", version))[0]
        except SyncError as error:
            logger.warning("version %d is pushed once more: %s", version, error)
        return {**(await self._all("push", version))[0], "sync/retries": 1.0}

    async def export(self, path: Path) -> None:
        await self._all("export", path)

    async def stop(self) -> None:
        """A rank in the middle of a step cannot be asked: it is killed after the bounded wait."""
        try:
            async with asyncio.timeout(STOP_S / 2):
                await self._all("close")
        except Exception as error:  # a rank that crashed before has nothing left to close
            logger.debug("trainer ranks were killed: %s", error)
        for actor in self._actors:
            ray.kill(actor)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(getattr(actor, method).remote(*args) for actor in self._actors))


class Fleet:
    """The engines of one `[engines.NAME]` table, with a router in front when there is more than one."""

    def __init__(self, name: str, config: EngineConfig, *, model: Path, log: Path) -> None:
        self._name = name
        on_gpus = not config.urls and resolve_device(config.device, config.env) == "cuda"
        gpus = config.tp * config.dp if on_gpus else 0
        self._actors = [
            spawn(actors.EngineActor, num_gpus=gpus, concurrency=4)(
                config, index, model, log / f"engine-{name}-{index}.log"
            )
            for index in range(config.num_servers)
        ]
        self._router: Any = None
        self._log = log
        self.urls: list[str] = []
        """Of each engine: where weights are pushed to."""
        self.url = ""
        """Where sessions send requests: the router, or the only engine."""

    async def start(self) -> None:
        """Start every engine at once, or attach to the given ones, then start the router.

        Raises:
            EngineStartError: with the end of the engine's log.
        """
        self.urls = list(await asyncio.gather(*(actor.start.remote() for actor in self._actors)))
        if len(self.urls) == 1:
            self.url = self.urls[0]
            return
        self._router = spawn(actors.RouterActor)(self._log / f"router-{self._name}.log")
        self.url = await self._router.start.remote(self.urls)

    async def watch(self) -> None:
        """Runs until the engines are stopped; raises EngineDied, with the end of its log, when one ends by itself."""
        await asyncio.gather(*(actor.watch.remote() for actor in self._actors))

    async def stop(self) -> None:
        await _stop_all([actor for actor in (self._router, *self._actors) if actor is not None], what="engine")


class SessionServers:
    """The session servers; a session lives on the one that its id hashes to."""

    def __init__(self, count: int) -> None:
        self._actors = [spawn(actors.SessionActor, concurrency=8)() for _ in range(count)]
        self.urls: list[str] = []
        self.api_key = secrets.token_urlsafe()
        """Opens sessions; other users of the machine do not have it."""

    async def start(self, engine_url: str, *, tokenizer: Path, family: str, max_context: int) -> None:
        """Serve in front of `engine_url`.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        starts = (
            actor.start.remote(
                engine_url,
                tokenizer=tokenizer,
                family=family,
                model=tokenizer.name,
                max_context=max_context,
                api_key=self.api_key,
            )
            for actor in self._actors
        )
        self.urls = list(await asyncio.gather(*starts))

    async def counters(self) -> list[Counters]:
        """Of each server."""
        return await asyncio.gather(*(actor.counters.remote() for actor in self._actors))

    async def stop(self) -> None:
        await _stop_all(self._actors, what="session server")


class Workers:
    """The rollout workers; a group goes to the least busy one."""

    def __init__(self, config: Config, *, run_dir: RunDir) -> None:
        concurrency = config.rollout.num_credits + 1024  # one call a group, evaluations beside them
        self._config = config
        self._run_dir = run_dir
        self._actors = [spawn(actors.WorkerActor, concurrency=concurrency)() for _ in range(config.workers.count)]
        self.run_group = LeastBusy([_RemoteWorker(actor, spool=True) for actor in self._actors])
        """Groups for training."""
        self.run_unspooled = LeastBusy([_RemoteWorker(actor, spool=False) for actor in self._actors])
        """Groups for evaluation: summaries only."""

    async def open(self) -> None:
        """Build the environment in every worker.

        Raises:
            ImportStringError: `env.target` leads nowhere.
            EnvError: it makes no environment.
        """
        await asyncio.gather(
            *(
                actor.open.remote(
                    name=f"worker-{index}",
                    env=self._config.env,
                    config=self._config.rollout,
                    num_workers=len(self._actors),
                    run_id=self._run_dir.path.name,
                    trajectories=self._run_dir.trajectories,
                )
                for index, actor in enumerate(self._actors)
            )
        )

    async def connect(self, sessions: SessionServers) -> None:
        await asyncio.gather(*(actor.connect.remote(sessions.urls, sessions.api_key) for actor in self._actors))

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return await self._actors[0].prompts.remote(split, limit)

    async def stop(self) -> None:
        await _stop_all(self._actors, what="worker")


class _RemoteWorker:
    """One worker actor as the `RunGroup` that the producer calls; cancellation reaches the actor."""

    def __init__(self, actor: Any, *, spool: bool) -> None:
        self._actor = actor
        self._spool = spool

    async def __call__(
        self, prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef:
        ref = self._actor.run_group.remote(prompt, group_id, group_size, attempt, sampling, self._spool)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
