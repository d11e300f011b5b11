"""Keeps the engines of a fleet alive, routes around the dead ones, and pauses the run while none serves.

```
 SupervisedEngine, one each ──state──▶ Supervisor ──serving urls──▶ Routing.route
                                             └── none serves ──▶ on_pause, FleetLostError after `pause_limit_s`
```
The supervisor knows neither Ray nor processes. Time is the event loop's, so that tests run on a virtual one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from miles_tito.errors import EngineError

from miles_rollout.engines.control import EngineProbe
from miles_rollout.engines.errors import FleetLostError
from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.states import EngineEvent, EngineState
from miles_rollout.engines.supervised import PushCount, Server, SupervisedEngine, attempt, now
from miles_rollout.engines.supervised import Sync as Sync

logger = logging.getLogger(__name__)

ROUTE_AGAIN_S = 0.5
"""Wait before routing is tried again after it failed."""


class Routing(Protocol):
    """Decides which engines get requests: in miles-core the router's actor and the session servers."""

    async def route(self, urls: Sequence[str]) -> None:
        """Send requests to exactly these from now on; without any, hold them back.

        May be cancelled and called again with other urls at any time.

        Raises:
            EngineError: not done yet; it will be tried again.
        """
        ...


class Supervisor:
    """Keeps the engines of one fleet alive, from their first start to the end of the run, for miles-core's driver."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        routing: Routing,
        probe: EngineProbe,
        sync: Sync,
        config: HealthConfig,
        on_event: Callable[[EngineEvent], None] | None = None,
        on_pause: Callable[[str | None], None] | None = None,
    ) -> None:
        """
        Args:
            servers: started, and serving the weights of the run as soon as the first push is through.
            on_event: called with each change of state.
            on_pause: called with the reason when no engine is left to serve, and with None when one serves again.
        """
        self._pushes = PushCount()
        self._engines = {
            server.url: SupervisedEngine(
                server, probe=probe, sync=sync, config=config, pushes=self._pushes, on_move=self._moved
            )
            for server in servers
        }
        self._routing = routing
        self._pause_limit_s = config.pause_limit_s
        self._on_event = on_event
        self._on_pause = on_pause
        self._changed = asyncio.Event()
        """Set, and replaced, at every change of state."""
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    async def run(self) -> None:
        """Supervise until cancelled.

        Raises:
            FleetLostError: every engine was given up, or none was healthy for `pause_limit_s`.
        """
        self.started()
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines.values():
                tasks.create_task(engine.supervise(), name=f"supervise {engine.url}")
            tasks.create_task(self._keep_routed(), name="route to the engines")
            tasks.create_task(self._limit_pause(), name="limit the pause of the fleet")

    def started(self) -> None:
        """All engines have come up; they take part in pushes from now on. `run` says so itself where nobody did."""
        for engine in self._engines.values():
            if engine.state is EngineState.STARTING:
                engine.move(EngineState.HEALTHY, "started")

    @property
    def serving(self) -> tuple[str, ...]:
        """Engines that get requests and take part in pushes."""
        return tuple(url for url, engine in self._engines.items() if engine.state.is_serving)

    @property
    def states(self) -> Mapping[str, EngineState]:
        return {url: engine.state for url, engine in self._engines.items()}

    async def wait_serving(self) -> None:
        """Returns as soon as an engine serves."""
        while not self.serving:
            await self._changed.wait()

    def pushing(self) -> AbstractContextManager[None]:
        """A block in which weights change: an engine is paused then, and probes say nothing about its health.

        Call `pushed` before the block ends.
        """
        return self._pushes.pushing()

    def pushed(self, version: int, *, reached: Iterable[str], failed: Mapping[str, str]) -> None:
        """How a push ended: engines that hold `version`, and those that do not with the reason, which are dead now."""
        for url in reached:
            self._engines[url].version = version
        for url, reason in failed.items():
            self.fail(url, f"version {version} did not reach it: {reason}")

    def fail(self, url: str, reason: str) -> None:
        """Report an engine that somebody else found dead."""
        self._engines[url].fail(reason)

    def reroute(self) -> None:
        """Route once more, after the router was started anew and knows no engine."""
        self._announce()

    def metrics(self) -> dict[str, float]:
        """Engines by state; restarts and paused seconds since the start."""
        states = [engine.state for engine in self._engines.values()]
        return {
            "engine/serving": float(len(self.serving)),
            "engine/suspect": float(states.count(EngineState.SUSPECT)),
            "engine/given_up": float(states.count(EngineState.GIVEN_UP)),
            "engine/restarts": float(sum(engine.num_restarts for engine in self._engines.values())),
            "engine/paused_seconds": self._paused_seconds
            + (0.0 if self._paused_at is None else now() - self._paused_at),
        }

    async def _keep_routed(self) -> None:
        """Make routing follow the states; a change in the middle of it starts over."""
        while True:
            changed = asyncio.create_task(self._changed.wait())
            routing = asyncio.create_task(self._route(self.serving))
            try:
                await asyncio.wait([changed, routing], return_when=asyncio.FIRST_COMPLETED)
                if routing.done():
                    routing.result()
                await changed
            finally:
                for task in (changed, routing):
                    task.cancel()
                await asyncio.wait([changed, routing])

    async def _route(self, urls: tuple[str, ...]) -> None:
        while True:
            try:
                return await self._routing.route(urls)
            except EngineError as error:
                logger.warning("routing to %s is tried again: %s", ", ".join(urls) or "no engine", error)
            await asyncio.sleep(ROUTE_AGAIN_S)

    async def _limit_pause(self) -> None:
        """End the run when it waits too long, or for nothing."""
        while True:
            changed = self._changed
            if all(engine.state is EngineState.GIVEN_UP for engine in self._engines.values()):
                raise await self._lost("Every engine was given up.")
            left = None if self._paused_at is None else self._paused_at + self._pause_limit_s - now()
            if left is not None and left <= 0:
                raise await self._lost(
                    f"No engine has served for {self._pause_limit_s:g} s (`pause_limit_s` of `health`)."
                )
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _lost(self, what: str) -> FleetLostError:
        lines = [what]
        for engine in self._engines.values():
            tail = await attempt(engine.server.log_tail(), f"read the log of {engine.url}")
            lines.append(f"{engine.url} is {engine.state}: {engine.reason}\n{tail or '(nothing in its log)'}")
        return FleetLostError("\n".join(lines))

    def _moved(self, event: EngineEvent) -> None:
        """An engine changed its state: the first to serve ends a pause, the last one to die begins it."""
        if self._on_event is not None:
            self._on_event(event)
        if not self.serving and self._paused_at is None and event.old.is_serving:
            self._paused_at = now()
            if self._on_pause is not None:
                self._on_pause(f"no engine is healthy; the last was {event.url}: {event.reason}")
        elif self.serving and self._paused_at is not None:
            self._paused_seconds += now() - self._paused_at
            self._paused_at = None
            if self._on_pause is not None:
                self._on_pause(None)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
