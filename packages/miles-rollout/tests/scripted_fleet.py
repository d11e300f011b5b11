"""Engines without processes: each dies, hangs and comes back when a test says so, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles_rollout.engines import EngineEvent, HealthConfig, Supervisor
from miles_tito import EngineError

START_S = 10.0


class ScriptedServer:
    """One engine: `Server` of the supervisor, and the process behind it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0
        """Weights in its memory; a start loads version 0."""
        self.is_up = True
        self.answers = True
        self.generates = True
        self.is_paused = False
        self.starts = 0
        self.failing_starts = 0
        self.failing_syncs = 0
        self.orphans = 0
        self.start_s = START_S
        self._gone = asyncio.Event()

    def die(self) -> None:
        """As after kill -9."""
        self.is_up = False
        self._gone.set()

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(self.start_s)
        if self.failing_starts > 0:
            self.failing_starts -= 1
            raise EngineError("it did not come up")
        self.is_up = self.answers = self.generates = True
        self.is_paused = False
        self.version = 0
        self._gone = asyncio.Event()

    async def ended(self) -> str:
        await self._gone.wait()
        return "exited with status 137"

    async def kill(self) -> None:
        self.die()

    async def log_tail(self) -> str:
        return f"last words of {self.url}"


class ScriptedFleet:
    """Engines and everything around them that the supervisor talks to: `Routing`, `Probe`, `Sync`, and a trainer.

    Attributes:
        routed: engines that get requests now.
        pauses: what `on_pause` was told.
    """

    def __init__(self, num_engines: int, config: HealthConfig | None = None, *, version: int = 0) -> None:
        self.servers = [ScriptedServer(f"http://engine-{i}") for i in range(num_engines)]
        self.by_url = {server.url: server for server in self.servers}
        self.current = version
        self.routed: tuple[str, ...] = tuple(self.by_url)
        self.events: list[EngineEvent] = []
        self.pauses: list[str | None] = []
        self.failing_routes = 0
        self._lock = asyncio.Lock()
        self.supervisor = Supervisor(
            self.servers,
            routing=self,
            probe=self,
            sync=self.sync,
            config=config or HealthConfig(),
            on_event=self.events.append,
            on_pause=self.pauses.append,
        )
        for server in self.servers:
            server.version = version
        self.supervisor.pushed(version, reached=self.by_url, failed={})

    def path(self, url: str) -> list[str]:
        """The states that an engine went through."""
        return [str(event.new) for event in self.events if event.url == url]

    def stale(self) -> list[str]:
        """Engines that would answer a request now with other weights than the run's."""
        return [
            url
            for url in self.routed
            if (server := self.by_url[url]).is_up and not server.is_paused and server.version != self.current
        ]

    async def push(self, *, seconds: float = 1.0, failing: Sequence[str] = ()) -> None:
        """The trainer's next version, to every serving engine; those that fail stay paused."""
        async with self._lock:
            with self.supervisor.pushing():
                targets = [self.by_url[url] for url in self.supervisor.serving]
                for server in targets:
                    server.is_paused = True
                await asyncio.sleep(seconds)
                self.current += 1
                reached = [s for s in targets if s.is_up and s.answers and s.url not in failing]
                for server in reached:
                    server.version, server.is_paused = self.current, False
                failed = {s.url: "refused" for s in targets if s not in reached}
                self.supervisor.pushed(self.current, reached=[s.url for s in reached], failed=failed)

    async def sync(self, url: str) -> int:
        async with self._lock:
            await asyncio.sleep(0.5)
            server = self.by_url[url]
            if server.failing_syncs > 0 or not server.is_up:
                server.failing_syncs -= 1
                raise EngineError("the sync was refused")
            server.version = self.current
            return self.current

    async def route(self, urls: Sequence[str]) -> None:
        self.routed = tuple(url for url in self.routed if url in urls)  # removals first
        await asyncio.sleep(0.1)
        if self.failing_routes > 0:
            self.failing_routes -= 1
            raise EngineError("the router is away")
        self.routed = tuple(urls)

    async def version(self, url: str) -> int | None:
        server = self.by_url[url]
        if not (server.is_up and server.answers):
            await asyncio.sleep(5.0)
            return None
        await asyncio.sleep(0.01)
        return server.version

    async def makes_progress(self, url: str) -> bool:
        server = self.by_url[url]
        is_well = server.is_up and server.answers and server.generates and not server.is_paused
        await asyncio.sleep(1.0 if is_well else 20.0)
        return is_well

    async def abort_all(self, url: str) -> None:
        self.by_url[url].orphans = 0
