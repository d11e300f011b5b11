"""A pool of servers that an environment depends on: sandboxes, browsers, verifiers, tools. Dead ones get no calls until
they pass a probe again.

```
             failure        `dead_after` failures in a row         probe passes      prepare passes
 HEALTHY ─────────────▶ SUSPECT ─────────────────────────▶ DEAD ──────────────▶ RETURNING ──▶ HEALTHY
    ▲────── success ──────┘                                 ▲──── anything fails ────┘
```
No endpoint comes from DEAD to HEALTHY but through RETURNING: a server that was restarted has lost what it was given, so
`prepare` gives it again before any episode uses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from miles_tito.shared.ports import port_of

from .errors import EndpointError, EnvironmentSetupError, InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Check = Callable[[str], Awaitable[None]]
"""An async function of an endpoint's url that raises when the endpoint does not pass."""

FAILURES = (EndpointError, aiohttp.ClientError, OSError, TimeoutError)
"""Errors that count against the endpoint; any other is the caller's."""


class EndpointState(StrEnum):
    """Whether an endpoint gets calls."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Failed lately; still gets calls."""
    DEAD = "dead"
    """Failed too often in a row: gets no calls, and is probed."""
    RETURNING = "returning"
    """Answers again, and is being prepared."""

    @property
    def is_serving(self) -> bool:
        return self in (EndpointState.HEALTHY, EndpointState.SUSPECT)


class EndpointPool:
    """Sends calls to the least busy of several equal servers, and leaves out those that fail.

    An environment makes one, uses it from one event loop, and closes it.

    ```python
    pool = EndpointPool(["http://sandbox-0:8000", "http://sandbox-1:8000"], timeout_s=30)
    output = await pool.call(lambda url: run_code(url, code))
    ```
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        probe: Check | None = None,
        prepare: Check | None = None,
        timeout_s: float = 60.0,
        dead_after: int = 3,
        probe_interval_s: float = 5.0,
        wait_s: float = 120.0,
    ) -> None:
        """
        Args:
            probe: whether a dead endpoint answers again; without one, that it accepts a connection.
            prepare: what a returned endpoint needs before it is used.
            timeout_s: of one call; a call that takes longer is a failure of its endpoint.
            dead_after: failures in a row after which an endpoint is dead.
            probe_interval_s: between two probes of a dead endpoint.
            wait_s: how long a call waits while every endpoint is dead.
        """
        if not urls or len(set(urls)) != len(urls):
            raise EnvironmentSetupError(f"An EndpointPool needs at least one url, and none twice; got {list(urls)}.")
        if dead_after < 1 or min(timeout_s, probe_interval_s) <= 0:
            raise EnvironmentSetupError(
                f"`dead_after` = {dead_after} must be at least 1; `timeout_s` = {timeout_s} and `probe_interval_s` = "
                f"{probe_interval_s} must be positive."
            )
        self._endpoints = [_Endpoint(url) for url in urls]
        self._probe = probe or accepts_connections
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._dead_after = dead_after
        self._probe_interval_s = probe_interval_s
        self._wait_s = wait_s
        self._revived = asyncio.Event()
        self._revivals: set[asyncio.Task[None]] = set()
        self._num_chosen = self._num_failed = self._num_sent_again = 0

    @property
    def states(self) -> Mapping[str, EndpointState]:
        return {endpoint.url: endpoint.state for endpoint in self._endpoints}

    async def call(self, work: Callable[[str], Awaitable[T]]) -> T:
        """The result of `work` on the least busy endpoint; where that one fails, once more on another.

        Only failures of the endpoint count (`FAILURES`; raise `EndpointError` for an answer such as 503). Everything
        else that `work` raises is the caller's and passes through. `work` must stand being run twice.

        Raises:
            InfraError: two endpoints failed, or none came back in time.
        """
        first: _Endpoint | None = None
        while True:
            endpoint = await self._choose(avoid=first)
            try:
                async with self._using(endpoint):
                    return await work(endpoint.url)
            except FAILURES as error:
                self._failed(endpoint, error)
                if first is not None:
                    raise InfraError(
                        f"Two endpoints failed: {first.url} ({first.problem}), then {endpoint.url} "
                        f"({endpoint.problem})."
                    ) from error
                first = endpoint
                self._num_sent_again += 1

    def metrics(self) -> dict[str, float]:
        """Endpoints in rotation, and calls that failed or were sent again since the start."""
        return {
            "endpoints/serving": float(sum(endpoint.state.is_serving for endpoint in self._endpoints)),
            "endpoints/dead": float(sum(not endpoint.state.is_serving for endpoint in self._endpoints)),
            "endpoints/failed_calls": float(self._num_failed),
            "endpoints/sent_again": float(self._num_sent_again),
        }

    async def aclose(self) -> None:
        """Stop probing."""
        for task in self._revivals:
            task.cancel()
        if self._revivals:
            await asyncio.wait(self._revivals)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _choose(self, *, avoid: _Endpoint | None) -> _Endpoint:
        """The serving endpoint with the fewest calls, in turn; waits while there is none."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not (serving := [e for e in self._endpoints if e.state.is_serving]):
                    await self._revived.wait()
        except TimeoutError as error:
            states = "; ".join(f"{e.url} ({e.problem})" for e in self._endpoints)
            raise InfraError(f"No endpoint was healthy for {self._wait_s:g} s: {states}.") from error
        chosen = min([e for e in serving if e is not avoid] or serving, key=lambda e: (e.calls, e.chosen))
        self._num_chosen += 1
        chosen.chosen = self._num_chosen
        return chosen

    @asynccontextmanager
    async def _using(self, endpoint: _Endpoint) -> AsyncGenerator[None]:
        endpoint.calls += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
            if endpoint.state.is_serving:
                endpoint.state, endpoint.failures = EndpointState.HEALTHY, 0
        finally:
            endpoint.calls -= 1

    def _failed(self, endpoint: _Endpoint, error: Exception) -> None:
        self._num_failed += 1
        endpoint.failures += 1
        endpoint.problem = f"{type(error).__name__}: {error}".rstrip(": ")
        if not endpoint.state.is_serving:
            return
        endpoint.state = EndpointState.SUSPECT
        if endpoint.failures < self._dead_after:
            return
        endpoint.state = EndpointState.DEAD
        logger.warning("endpoint %s is dead after %d failures: %s", endpoint.url, endpoint.failures, endpoint.problem)
        self._revived.clear()
        task = asyncio.create_task(self._revive(endpoint), name=f"revive {endpoint.url}")
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, endpoint: _Endpoint) -> None:
        """Probe a dead endpoint until it passes, and prepare it."""
        while True:
            await asyncio.sleep(self._probe_interval_s)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._probe(endpoint.url)
                    endpoint.state = EndpointState.RETURNING
                    if self._prepare is not None:
                        await self._prepare(endpoint.url)
            except FAILURES as error:
                endpoint.state = EndpointState.DEAD
                endpoint.problem = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            endpoint.state, endpoint.failures = EndpointState.HEALTHY, 0
            logger.warning("endpoint %s is back", endpoint.url)
            self._revived.set()
            return


class _Endpoint:
    """The state of one endpoint in its pool."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.state = EndpointState.HEALTHY
        self.failures = 0
        """In a row."""
        self.calls = 0
        self.chosen = 0
        """When it was last chosen, counted in choices."""
        self.problem = ""


async def accepts_connections(url: str) -> None:
    """Raise unless something listens at `url`."""
    _, writer = await asyncio.open_connection(urlsplit(url).hostname, port_of(url))
    writer.close()
    await writer.wait_closed()
