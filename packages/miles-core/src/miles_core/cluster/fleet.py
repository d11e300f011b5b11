"""The engines of a run, a process each, the router in front of them, and the supervisor that keeps them alive.

sessions ──▶ router ──▶ engines ◀── supervisor: probes, restarts, syncs
   ▲                                    │
   └──── paused while none serves ──────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from miles_rollout.engines import (
    AttachedServer,
    EngineConfig,
    EngineEvent,
    EngineProbe,
    EngineServer,
    EngineStartError,
    Supervisor,
    resolve_device,
)
from miles_rollout.engines.router import Router
from miles_rollout.engines.supervisor import Sync
from miles_tito.errors import EngineError
from miles_tito.shared.ports import port_of

from .remote import OnEvent, ProcessDied, Remote, Resources, stop_all
from .sessions import SessionServers
from .workers import RolloutWorkers

logger = logging.getLogger(__name__)

KILL_S = 30.0
"""How long an engine's process may take to end its server, before it is killed itself."""
ROUTE_S = 10.0
"""How long one try to change the router's engines may take: another change may be waiting."""
FIRST_ROUTE_S = 120.0
"""The same at the start, when nothing else is going on and the machine is busy."""
CALLS = 16
"""Calls at once on an engine's process or the router's: some last as long as it lives."""


class EngineFleet:
    """The engines of one `[engines.NAME]` table, with a router in front when there is more than one.

    `started` makes it for the run, an evaluation for itself; the supervisor calls `route`.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model: Path,
        log: Path,
        sessions: SessionServers,
        workers: RolloutWorkers,
        sync: Sync,
        on_event: OnEvent,
    ) -> None:
        """
        Args:
            sessions: in front of the engines; watched along with them, and paused when none serves.
            workers: paused like the sessions.
            sync: brings one engine to the run's weights.
            on_event: called with everything that happens to engines and router.
        """
        self._config = config
        self._sessions = sessions
        self._workers = workers
        self._on_event = on_event
        self._sync = sync
        self._engines = [
            _Engine(config, index, model=model, log_path=log / f"engine-{name}-{index}.log")
            for index in range(config.num_servers)
        ]
        self._router = _Router(log / f"router-{name}.log", on_event) if config.num_servers > 1 else None
        self._supervisor: Supervisor | None = None
        self.url = ""
        """Where sessions send requests: the router, or the only engine."""

    @property
    def urls(self) -> list[str]:
        """Of each engine, serving or not: where weights are pushed to."""
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
            on_event=self._on_change,
            on_pause=self._on_pause,
        )
        self._supervisor.started()

    async def watch(self) -> None:
        """Keep engines, router and session servers alive.

        Raises:
            FleetLostError: no engine is left, with the end of each one's log.
            ProcessLostError: the router or a session server dies again and again.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.supervisor.run())
            tasks.create_task(self._sessions.watch())
            if self._router is not None:
                tasks.create_task(self._router.watch(self.supervisor.reroute))

    async def route(self, urls: Sequence[str]) -> None:
        """Send requests to exactly these engines; without any, let them wait."""
        if not urls:
            await self._pause(True)
        if self._router is not None:
            await self._router.route(urls)
        if urls:
            await self._pause(False)

    async def stop(self) -> None:
        routers = [] if self._router is None else [self._router.process]
        await stop_all([*routers, *(engine.process for engine in self._engines)])

    async def _pause(self, is_paused: bool) -> None:
        await asyncio.gather(self._sessions.pause(is_paused), self._workers.pause(is_paused))

    def _on_change(self, event: EngineEvent) -> None:
        self._on_event("engine", event.url, f"{event.old} → {event.new}: {event.reason}")

    def _on_pause(self, reason: str | None) -> None:
        if reason is None:
            logger.warning("the run goes on: an engine serves again")
        else:
            logger.warning("the run pauses: %s", reason)
        self._on_event("run", "pause", reason or "over")


class _Engine:
    """One engine as the supervisor sees it, whatever becomes of the process that runs it."""

    def __init__(self, config: EngineConfig, index: int, *, model: Path, log_path: Path) -> None:
        on_gpus = not config.urls and resolve_device(config.device, config.env) == "cuda"
        resources = Resources(num_gpus=config.tp * config.dp if on_gpus else 0, concurrency=CALLS)
        self.url = ""
        self.process = Remote(
            AttachedServer if config.urls else EngineServer, kind="engine", name=log_path.stem, resources=resources
        )
        if config.urls:
            self._spawn = partial(self.process.spawn, config.urls[index], start_timeout_s=config.start_timeout_s)
        else:
            self._spawn = lambda: self.process.spawn(config, model_path=model, log_path=log_path, port=_port(self.url))
        self._spawn()

    async def start(self) -> None:
        """Start the server, also again after its end; its url stays the same."""
        try:
            await self.process.call("start")
            self.url = await self.process.call("wait_ready")
        except ProcessDied as error:
            self._spawn()
            raise EngineStartError("The process that starts the engine died; there is a new one.") from error

    async def ended(self) -> str:
        return await self.process.ended("watch")

    async def kill(self) -> None:
        try:
            async with asyncio.timeout(KILL_S):
                await self.process.call("stop")
        except (ProcessDied, TimeoutError):
            self._spawn()  # for the same address; whatever the old process started ends with it

    async def log_tail(self) -> str:
        try:
            return await self.process.call("log_tail")
        except ProcessDied as error:
            raise EngineError(f"the process that watches {self.url} died") from error


class _Router:
    """The router, whatever becomes of the process that runs it."""

    def __init__(self, log_path: Path, on_event: OnEvent) -> None:
        self._log_path = log_path
        self.process = Remote(Router, kind="router", resources=Resources(concurrency=CALLS), on_event=on_event)
        self.process.spawn(log_path=log_path)

    async def start(self) -> str:
        """Start it, also again after its end; its url stays the same."""
        self.process.name = await self.process.call("start")
        return self.process.name

    async def route(self, urls: Sequence[str], *, timeout_s: float = ROUTE_S) -> None:
        try:
            await self.process.call("set_workers", list(urls), timeout_s=timeout_s)
        except ProcessDied as error:
            raise EngineError("the process that runs the router died") from error

    async def watch(self, on_restart: Callable[[], None]) -> None:
        """Start it again at its address whenever it ends; engines are routed to anew then."""
        while True:
            await self.process.backoff(await self.process.ended("ended"))
            try:
                await self._start_again()
            except EngineError as error:
                logger.warning("the router did not start: %s", error)
            else:
                on_restart()

    async def _start_again(self) -> None:
        try:
            await self.start()
        except ProcessDied:
            self.process.spawn(log_path=self._log_path, port=_port(self.process.name))
            await self.start()


def _port(url: str) -> int:
    """Where to listen again; 0, any port, before the first start."""
    return port_of(url) if url else 0
