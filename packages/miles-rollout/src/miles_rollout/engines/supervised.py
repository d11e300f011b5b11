"""One engine under supervision: it serves until it dies, comes back, and is given up when restarts do not help.

```
            probes, process exit, failed pushes
 HEALTHY ──────────────▶ DEAD ──back-off──▶ RESTARTING ──▶ SYNCING ──▶ HEALTHY
                                                 abort orphans  sync(url)
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from miles_tito.errors import EngineError

from miles_rollout.engines.control import EngineProbe
from miles_rollout.engines.health import HealthConfig, ProbeRecord, worst
from miles_rollout.engines.states import EngineEvent, EngineLife, EngineState
from miles_rollout.errors import first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

Sync = Callable[[str], Awaitable[int]]
"""Brings one engine to the run's current weights and returns their version. It must release whatever keeps other
pushes out in the same step of the event loop in which it returns: from then on the engine takes part in them."""


class Server(Protocol):
    """One engine's server, as miles-core wraps it in a Ray actor. Its url stays the same however often it starts.

    `start` starts it again, or waits for it where somebody else runs it; it returns when the server answers, and raises
    EngineError where it does not come up. `ended` returns when the server is gone, with what is known about the reason.
    After `kill` nothing of it runs any more, but a server of somebody else. `log_tail` is "" where there is no log.
    """

    @property
    def url(self) -> str: ...

    async def start(self) -> None: ...

    async def ended(self) -> str: ...

    async def kill(self) -> None: ...

    async def log_tail(self) -> str: ...


class PushCount:
    """Weight updates under way. An engine is then paused by design, and probes say nothing about its health."""

    def __init__(self) -> None:
        self._num_running = 0
        self.num_begun = 0

    @contextmanager
    def pushing(self) -> Generator[None]:
        self._num_running += 1
        self.num_begun += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def touched(self, num_begun: int) -> bool:
        """Whether one ran at any time since `num_begun` was read."""
        return bool(self._num_running) or self.num_begun != num_begun


class SupervisedEngine(EngineLife):
    """One engine of a fleet, from its first start until it is given up; the supervisor runs a task for each."""

    def __init__(
        self,
        server: Server,
        *,
        probe: EngineProbe,
        sync: Sync,
        config: HealthConfig,
        pushes: PushCount,
        on_move: Callable[[EngineEvent], None],
    ) -> None:
        super().__init__(server.url)
        self.server = server
        self.reason = ""
        """Of its present state."""
        self.version: int | None = None
        """Weights that it must report; None before the first push."""
        self.num_restarts = 0
        self._probe = probe
        self._sync = sync
        self._config = config
        self._pushes = pushes
        self._on_move = on_move
        self._recent_restarts = 0
        """Since the last healthy spell."""
        self._died = asyncio.Event()
        self._records: tuple[ProbeRecord, ...] = ()

    def move(self, new: EngineState, reason: str) -> EngineEvent:
        """Change its state, and report it."""
        event = super().move(new, reason)
        self.reason = reason
        level = logging.INFO if new in (EngineState.HEALTHY, EngineState.SYNCING) else logging.WARNING
        logger.log(level, "engine %s: %s → %s: %s", event.url, event.old, event.new, reason)
        self._on_move(event)
        return event

    def fail(self, reason: str) -> None:
        """It is dead; one that does not serve is being restarted already."""
        if self.state.is_serving:
            self.move(EngineState.DEAD, reason)
            self._died.set()

    async def supervise(self) -> None:
        """Serve until it dies, come back, again and again; returns when it is given up."""
        while True:
            if self.state.is_serving:
                await self._until_dead()
            await attempt(self.server.kill(), f"kill the engine at {self.url}")
            if self._recent_restarts >= self._config.max_restarts:
                self.move(EngineState.GIVEN_UP, f"{self._recent_restarts} restarts did not help; {self.reason}")
                return
            await asyncio.sleep(self._config.backoff(self._recent_restarts))
            await self._revive()

    async def _until_dead(self) -> None:
        """Watch it while it serves, by its exit, its probes, and what others report."""
        self._died.clear()
        began = now()
        self._records = answers, progress = ProbeRecord(began), ProbeRecord(began)
        watchers = [
            asyncio.create_task(self._watch_exit()),
            asyncio.create_task(self._watch(answers, self._answers, self._config.probe_interval_s)),
            asyncio.create_task(self._watch(progress, self._makes_progress, self._config.progress_interval_s)),
            asyncio.create_task(self._died.wait()),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done:
                watcher.result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.wait(watchers)
        if now() - began >= self._config.healthy_spell_s:
            self._recent_restarts = 0

    async def _watch_exit(self) -> None:
        self.fail(await self.server.ended())

    async def _watch(self, record: ProbeRecord, ask: Callable[[], Awaitable[str | None]], interval_s: float) -> None:
        """Ask again and again; returns when the engine is dead."""
        while self.state.is_serving:
            await asyncio.sleep(interval_s)
            before = self._pushes.num_begun
            problem = await ask()
            if self._pushes.touched(before):
                record.add(None, now())  # nothing is known; the time of the push does not count against it
            else:
                record.add(problem, now())
                self._judge()

    async def _answers(self) -> str | None:
        """What is wrong with its answer to a short question; None when it is as expected."""
        before = self._pushes.num_begun
        version = await self._probe.version(self.url)
        if version is None:
            return "it does not answer"
        if self.version is not None and version != self.version and not self._pushes.touched(before):
            # Whoever restarted it, or changed its weights: a token of it would be somebody else's.
            self.fail(f"it serves version {version} instead of {self.version}: it was started anew")
        return None

    async def _makes_progress(self) -> str | None:
        return None if await self._probe.makes_progress(self.url) else "no token gets through"

    def _judge(self) -> None:
        """Healthy, suspect or dead, by the probes."""
        if not self.state.is_serving:
            return
        record = worst(self._records, suspect_after=self._config.suspect_after)
        if record is None:
            if self.state is EngineState.SUSPECT and not any(record.misses for record in self._records):
                self.move(EngineState.HEALTHY, "it answers again")
            return
        silent_s = now() - record.last_good
        if silent_s >= self._config.dead_after_s:
            self.fail(f"{record.problem}, for {silent_s:.0f} s ({record.misses} probes)")
        elif self.state is EngineState.HEALTHY:
            self.move(EngineState.SUSPECT, f"{record.problem} ({record.misses} probes)")

    async def _revive(self) -> None:
        """Start it and bring it to the run's weights; dead again where that fails."""
        self._recent_restarts += 1
        self.num_restarts += 1
        self.move(EngineState.RESTARTING, f"restart {self._recent_restarts} of {self._config.max_restarts}")
        try:
            await self.server.start()
            # Whatever it still runs was sent again to another engine, or given up.
            await self._probe.abort_all(self.url)
            self.move(EngineState.SYNCING, "it answers")
            self.version = await self._sync(self.url)
            # Nothing may be awaited in between: see `Sync`.
            self.move(EngineState.HEALTHY, f"it holds version {self.version}")
        except EngineError as error:
            logger.warning("the engine at %s did not come back: %s", self.url, error)
            self.move(EngineState.DEAD, f"it did not come back: {first_line(str(error))}")


def now() -> float:
    """The event loop's time, which tests set."""
    return asyncio.get_running_loop().time()


async def attempt(work: Awaitable[T], what: str) -> T | None:
    """The result of `work`; a failure is only worth a warning, since the engine is lost anyway."""
    try:
        return await work
    except EngineError as error:
        logger.warning("could not %s: %s", what, error)
    return None
