"""The engines of a run, an actor each, the router in front of them, and the supervisor that keeps them alive.

sessions ──▶ router ──▶ engines ◀── supervisor: probes, restarts, syncs
   ▲                                    │
   └── held back while none serves ─────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from miles_rollout.engines import (
    EngineConfig,
    EngineEvent,
    EngineProbe,
    EngineStartError,
    Supervisor,
    resolve_device,
)
from miles_rollout.engines.supervisor import Sync
from miles_tito.errors import EngineError
from ray.exceptions import RayActorError

from miles_core.parts import Note

from . import actors
from .processes import spawn, stop_all
from .respawn import Respawns, ended
from .sessions import SessionServers
from .workers import Workers

logger = logging.getLogger(__name__)

KILL_S = 30.0
"""How long an engine's actor may take to end its server, before the actor is killed itself."""
ROUTE_S = 10.0
"""How long one try to change the router's engines may take: another change may be waiting."""
FIRST_ROUTE_S = 120.0
"""The same at the start, when nothing else is going on and the machine is busy."""


class Fleet:
    """The engines of one `[engines.NAME]` table, with a router in front when there is more than one."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model: Path,
        log: Path,
        sessions: SessionServers,
        workers: Workers,
        sync: Sync,
        note: Note,
    ) -> None:
        """
        Args:
            sessions: in front of the engines; watched along with them.
            workers: told, like the sessions, when no engine serves.
            sync: brings one engine to the run's weights.
            note: told of everything that happens to engines, router and session servers.
        """
        self._config = config
        self._sessions = sessions
        self._workers = workers
        self._note = note
        self._sync = sync
        self._engines = [
            _Engine(config, index, model, log / f"engine-{name}-{index}.log") for index in range(config.num_servers)
        ]
        self._router = _Router(log / f"router-{name}.log") if config.num_servers > 1 else None
        self._supervisor: Supervisor | None = None
        self.url = ""
        """Where sessions send requests: the router, or the only engine."""

    @property
    def urls(self) -> list[str]:
        """Of each engine, serving or not."""
        return [engine.url for engine in self._engines]

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "start() comes first"
        return self._supervisor

    async def start(self) -> None:
        """Start every engine at once, or attach to the given ones, then start the router.

        Raises:
            EngineStartError: with the end of the engine's log.
        """
        await asyncio.gather(*(engine.start() for engine in self._engines))
        if self._router is None:
            self.url = self._engines[0].url
        else:
            self.url = await self._router.start()
            await self._router.route(self.urls, timeout_s=FIRST_ROUTE_S)
        self._supervisor = Supervisor(
            self._engines,
            routing=self,
            probe=EngineProbe(),
            sync=self._sync,
            config=self._config.health,
            on_event=self._tell,
            on_pause=self._tell_pause,
        )
        self._supervisor.started()

    async def watch(self) -> None:
        """Keep engines, router and session servers alive.

        Raises:
            FleetLostError: no engine is left, with the end of each one's log.
            PartLostError: the router or a session server dies again and again.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.supervisor.run())
            tasks.create_task(self._sessions.watch(self._note))
            if self._router is not None:
                tasks.create_task(self._router.keep(self._note, self.supervisor.reroute))

    async def route(self, urls: Sequence[str]) -> None:
        """Send requests to exactly these engines; without any, hold them back."""
        if not urls:
            await self._hold(True)
        if self._router is not None:
            await self._router.route(urls)
        if urls:
            await self._hold(False)

    async def _hold(self, is_held: bool) -> None:
        await asyncio.gather(self._sessions.hold(is_held), self._workers.hold(is_held))

    def metrics(self) -> dict[str, float]:
        return self.supervisor.metrics()

    async def stop(self) -> None:
        parts = [part for part in (self._router, *self._engines) if part is not None]
        await stop_all([part.actor for part in parts], what="engine")

    def _tell(self, event: EngineEvent) -> None:
        self._note("engine", event.url, f"{event.old} → {event.new}: {event.reason}")

    def _tell_pause(self, reason: str | None) -> None:
        if reason is None:
            logger.warning("the run goes on: an engine serves again")
            self._note("run", "pause", "over")
        else:
            logger.warning("the run pauses: %s", reason)
            self._note("run", "pause", reason)


class _Engine:
    """One engine as the supervisor sees it, whatever becomes of its actor."""

    def __init__(self, config: EngineConfig, index: int, model: Path, log_path: Path) -> None:
        on_gpus = not config.urls and resolve_device(config.device, config.env) == "cuda"
        self._make = spawn(
            actors.EngineActor, num_gpus=config.tp * config.dp if on_gpus else 0, concurrency=actors.ENGINE_CALLS
        )
        self._args = (config, index, model, log_path)
        self.url = ""
        self.actor = self._make(*self._args, 0)

    async def start(self) -> None:
        try:
            self.url = await self.actor.start.remote()
        except RayActorError as error:
            self._replace()
            raise EngineStartError("The process that starts the engine died; there is a new one.") from error

    async def ended(self) -> str:
        return await ended(self.actor.watch.remote())

    async def kill(self) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                await self.actor.stop.remote()
        except (RayActorError, TimeoutError):
            self._replace()

    async def log_tail(self) -> str:
        try:
            return await self.actor.log_tail.remote()
        except RayActorError as error:
            raise EngineError(f"the process that watches {self.url} died") from error

    def _replace(self) -> None:
        """A new process for the same address; whatever the old one started ends with it."""
        ray.kill(self.actor)
        self.actor = self._make(*self._args, _port(self.url))


class _Router:
    """The router, whatever becomes of its actor."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._url = ""
        self.actor = self._make(0)

    async def start(self) -> str:
        self._url = await self.actor.start.remote()
        return self._url

    async def route(self, urls: Sequence[str], *, timeout_s: float = ROUTE_S) -> None:
        try:
            await self.actor.set_workers.remote(list(urls), timeout_s)
        except RayActorError as error:
            raise EngineError("the process that runs the router died") from error

    async def keep(self, note: Note, started_anew: Callable[[], None]) -> None:
        """Start it again at its address whenever it ends; engines are routed to anew then."""
        respawns = Respawns("router", self._url)
        while True:
            await respawns.after(await ended(self.actor.ended.remote()), note)
            try:
                await self._start_anew()
            except EngineError as error:
                logger.warning("the router did not start: %s", error)
            else:
                started_anew()

    async def _start_anew(self) -> None:
        try:
            await self.start()
        except RayActorError:
            ray.kill(self.actor)
            self.actor = self._make(_port(self._url))
            await self.start()

    def _make(self, port: int) -> Any:
        return spawn(actors.RouterActor, concurrency=actors.ENGINE_CALLS)(self._log_path, port)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2]) if url else 0
