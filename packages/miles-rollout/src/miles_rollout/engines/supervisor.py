"""Keeps the engines of a fleet alive: watches each, routes around the dead, restarts them and syncs their weights.

```
            probes, process exit, failed pushes
 HEALTHY ──────────────▶ DEAD ──back-off──▶ RESTARTING ──▶ SYNCING ──▶ HEALTHY
    │                     │                      abort orphans  sync(url)  │
    └─────────────────────┴──────── Routing.route(serving urls) ───────────┘
```
The supervisor knows neither Ray nor processes: servers, routing and probes are the protocols below. Time is the event
loop's, so that tests run on a virtual one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from miles_tito.errors import EngineError

from miles_rollout.engines.errors import FleetLostError
from miles_rollout.engines.health import HealthConfig
from miles_rollout.engines.states import EngineEvent, EngineLife, EngineState
from miles_rollout.guards import first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROUTE_AGAIN_S = 0.5
"""Wait before routing is tried again after it failed."""


class Server(Protocol):
    """One engine's server. Its url stays the same however often it is started."""

    @property
    def url(self) -> str: ...

    async def start(self) -> None:
        """Start it again, or wait for it where somebody else runs it; returns when it answers.

        Raises:
            EngineError: it did not come up.
        """
        ...

    async def ended(self) -> str:
        """Returns when the server is gone, with what is known about the reason; else never."""
        ...

    async def kill(self) -> None:
        """Make sure that nothing of it runs any more; a server of somebody else is left alone."""
        ...

    async def log_tail(self) -> str:
        """The last lines of its log, "" where there is none."""
        ...


class Probe(Protocol):
    """Questions to a running engine."""

    async def version(self, url: str) -> int | None:
        """The weights that it says it serves; None when it does not answer."""
        ...

    async def makes_progress(self, url: str) -> bool:
        """Whether a token gets through. May take long."""
        ...

    async def abort_all(self, url: str) -> None:
        """End everything that it runs."""
        ...


class Routing(Protocol):
    """Decides which engines get requests."""

    async def route(self, urls: Sequence[str]) -> None:
        """Send requests to exactly these from now on; without any, hold them back.

        May be cancelled and called again with other urls at any time.

        Raises:
            EngineError: not done yet; it will be tried again.
        """
        ...


Sync = Callable[[str], Awaitable[int]]
"""Brings one engine to the run's current weights and returns their version. It must let go of whatever keeps other
pushes out in the same step of the event loop in which it returns: from then on the engine takes part in them."""


class Supervisor:
    """Looks after the engines of one fleet, from their first start to the end of the run."""

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        routing: Routing,
        probe: Probe,
        sync: Sync,
        config: HealthConfig,
        on_event: Callable[[EngineEvent], None] | None = None,
        on_pause: Callable[[str | None], None] | None = None,
    ) -> None:
        """
        Args:
            servers: started, and serving the weights of the run as soon as the first push is through.
            on_event: told of each change of state.
            on_pause: told the reason when no engine is left to serve, and None when one serves again.
        """
        self._engines = {server.url: _Engine(server) for server in servers}
        self._routing = routing
        self._probe = probe
        self._sync = sync
        self._config = config
        self._on_event = on_event
        self._on_pause = on_pause
        self._changed = asyncio.Event()
        """Set, and replaced, at every change of state."""
        self._num_pushing = 0
        self._num_pushes = 0
        self._num_restarts = 0
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
                tasks.create_task(self._look_after(engine), name=f"look after {engine.url}")
            tasks.create_task(self._keep_routed(), name="route to the engines")
            tasks.create_task(self._limit_pause(), name="limit the pause of the fleet")

    def started(self) -> None:
        """All engines have come up; they take part in pushes from now on. `run` says so itself where nobody did."""
        for engine in self._engines.values():
            if engine.state is EngineState.STARTING:
                self._move(engine, EngineState.HEALTHY, "started")

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

    @contextmanager
    def pushing(self) -> Generator[None]:
        """While weights change, an engine is paused by design: probes meanwhile say nothing about its health.

        Call `pushed` before the block ends.
        """
        self._num_pushing += 1
        self._num_pushes += 1
        try:
            yield
        finally:
            self._num_pushing -= 1

    def pushed(self, version: int, *, reached: Iterable[str], failed: Mapping[str, str]) -> None:
        """How a push ended: engines that hold `version`, and those that do not with the reason, which are dead now."""
        for url in reached:
            self._engines[url].version = version
        for url, reason in failed.items():
            self.fail(url, f"version {version} did not reach it: {reason}")

    def fail(self, url: str, reason: str) -> None:
        """Report an engine that somebody else found dead; one that does not serve is being seen to already."""
        engine = self._engines[url]
        if engine.state.is_serving:
            self._move(engine, EngineState.DEAD, reason)
            engine.died.set()

    def reroute(self) -> None:
        """Tell routing once more, since it forgot: the router was started anew."""
        self._announce()

    def metrics(self) -> dict[str, float]:
        """Engines by state; restarts and paused seconds since the start."""
        states = [engine.state for engine in self._engines.values()]
        return {
            "engine/serving": float(len(self.serving)),
            "engine/suspect": float(states.count(EngineState.SUSPECT)),
            "engine/given_up": float(states.count(EngineState.GIVEN_UP)),
            "engine/restarts": float(self._num_restarts),
            "engine/paused_seconds": self._paused_seconds
            + (0.0 if self._paused_at is None else _now() - self._paused_at),
        }

    async def _look_after(self, engine: _Engine) -> None:
        """The life of one engine: serve until it dies, come back, until it is given up."""
        while True:
            if engine.state.is_serving:
                await self._until_dead(engine)
            await _try(engine.server.kill(), f"kill the engine at {engine.url}")
            if engine.restarts >= self._config.max_restarts:
                why = f"{engine.restarts} restarts did not help; {engine.reason}"
                self._move(engine, EngineState.GIVEN_UP, why)
                return
            await asyncio.sleep(self._config.backoff(engine.restarts))
            await self._revive(engine)

    async def _until_dead(self, engine: _Engine) -> None:
        """Watch a serving engine until it is dead, by its exit, its probes, or what others report."""
        engine.died.clear()
        began = _now()
        answers, progress = _Pulse(began), _Pulse(began)
        watchers = [
            asyncio.create_task(self._watch_exit(engine)),
            asyncio.create_task(self._watch(engine, answers, self._answers, self._config.probe_interval_s)),
            asyncio.create_task(self._watch(engine, progress, self._makes_progress, self._config.progress_interval_s)),
            asyncio.create_task(engine.died.wait()),
        ]
        engine.pulses = (answers, progress)
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done:
                watcher.result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.wait(watchers)
        if _now() - began >= self._config.healthy_spell_s:
            engine.restarts = 0

    async def _watch_exit(self, engine: _Engine) -> None:
        self.fail(engine.url, await engine.server.ended())

    async def _watch(
        self, engine: _Engine, pulse: _Pulse, check: Callable[[_Engine], Awaitable[str | None]], interval_s: float
    ) -> None:
        """Ask again and again; returns when the engine is dead."""
        while engine.state.is_serving:
            await asyncio.sleep(interval_s)
            pushes = self._num_pushes
            problem = await check(engine)
            if self._num_pushing or self._num_pushes != pushes:
                pulse.beat(_now())  # nothing is known; the time of the push does not count against it
                continue
            if problem is None:
                pulse.beat(_now())
            else:
                pulse.miss(problem)
            self._judge(engine)

    async def _answers(self, engine: _Engine) -> str | None:
        """What is wrong with the engine's answer to a short question; None when it is as expected."""
        pushes = self._num_pushes
        version = await self._probe.version(engine.url)
        if version is None:
            return "it does not answer"
        was_pushed = self._num_pushing or self._num_pushes != pushes
        if engine.version is not None and version != engine.version and not was_pushed:
            # Whoever restarted it, or changed its weights: a token of it would be somebody else's.
            self.fail(engine.url, f"it serves version {version} instead of {engine.version}: it was started anew")
        return None

    async def _makes_progress(self, engine: _Engine) -> str | None:
        return None if await self._probe.makes_progress(engine.url) else "no token gets through"

    def _judge(self, engine: _Engine) -> None:
        """Healthy, suspect or dead, by the pulses."""
        if not engine.state.is_serving:
            return
        weak = [pulse for pulse in engine.pulses if pulse.misses >= self._config.suspect_after]
        if not weak:
            if engine.state is EngineState.SUSPECT and not any(pulse.misses for pulse in engine.pulses):
                self._move(engine, EngineState.HEALTHY, "it answers again")
            return
        worst = min(weak, key=lambda pulse: pulse.last)
        silent_s = _now() - worst.last
        if silent_s >= self._config.dead_after_s:
            self.fail(engine.url, f"{worst.problem}, for {silent_s:.0f} s ({worst.misses} probes)")
        elif engine.state is EngineState.HEALTHY:
            self._move(engine, EngineState.SUSPECT, f"{worst.problem} ({worst.misses} probes)")

    async def _revive(self, engine: _Engine) -> None:
        """Start a dead engine and bring it to the run's weights; dead again where that fails."""
        engine.restarts += 1
        self._num_restarts += 1
        self._move(engine, EngineState.RESTARTING, f"restart {engine.restarts} of {self._config.max_restarts}")
        try:
            await engine.server.start()
            # Whatever it still runs was sent again to another engine, or given up.
            await self._probe.abort_all(engine.url)
            self._move(engine, EngineState.SYNCING, "it answers")
            engine.version = await self._sync(engine.url)
            # Nothing may be awaited in between: see `Sync`.
            self._move(engine, EngineState.HEALTHY, f"it holds version {engine.version}")
        except EngineError as error:
            logger.warning("the engine at %s did not come back: %s", engine.url, error)
            self._move(engine, EngineState.DEAD, f"it did not come back: {first_line(str(error))}")

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
            left = None if self._paused_at is None else self._paused_at + self._config.pause_limit_s - _now()
            if left is not None and left <= 0:
                raise await self._lost(
                    f"No engine has served for {self._config.pause_limit_s:g} s (`pause_limit_s` of `health`)."
                )
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _lost(self, what: str) -> FleetLostError:
        parts = [what]
        for engine in self._engines.values():
            tail = await _try(engine.server.log_tail(), f"read the log of {engine.url}")
            parts.append(f"{engine.url} is {engine.state}: {engine.reason}\n{tail or '(nothing in its log)'}")
        return FleetLostError("\n".join(parts))

    def _move(self, engine: _Engine, new: EngineState, reason: str) -> None:
        event = engine.life.move(new, reason)
        engine.reason = reason
        level = logging.INFO if new in (EngineState.HEALTHY, EngineState.SYNCING) else logging.WARNING
        logger.log(level, "engine %s: %s → %s: %s", event.url, event.old, event.new, reason)
        if self._on_event is not None:
            self._on_event(event)
        self._note_pause(event)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_pause(self, event: EngineEvent) -> None:
        """Tell when the last engine stops serving, and when the first one serves again."""
        if not self.serving and self._paused_at is None and event.old.is_serving:
            self._paused_at = _now()
            if self._on_pause is not None:
                self._on_pause(f"no engine is healthy; the last was {event.url}: {event.reason}")
        elif self.serving and self._paused_at is not None:
            self._paused_seconds += _now() - self._paused_at
            self._paused_at = None
            if self._on_pause is not None:
                self._on_pause(None)


class _Pulse:
    """One kind of sign of life of an engine."""

    def __init__(self, now: float) -> None:
        self.last = now
        self.misses = 0
        self.problem = ""

    def beat(self, now: float) -> None:
        self.last = now
        self.misses = 0

    def miss(self, problem: str) -> None:
        self.misses += 1
        self.problem = problem


class _Engine:
    """What the supervisor knows about one engine."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self.life = EngineLife(server.url)
        self.reason = ""
        """Of its present state."""
        self.version: int | None = None
        """Weights that it must report; None before the first push."""
        self.restarts = 0
        """Since the last healthy spell."""
        self.died = asyncio.Event()
        self.pulses: tuple[_Pulse, ...] = ()

    @property
    def state(self) -> EngineState:
        return self.life.state


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _try(work: Awaitable[T], what: str) -> T | None:
    """The result of `work`; a failure is only worth a warning, since the engine is lost anyway."""
    try:
        return await work
    except EngineError as error:
        logger.warning("could not %s: %s", what, error)
    return None
