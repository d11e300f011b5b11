"""HTTP between the processes of a run, with aiohttp.

aiohttp rather than httpx: with hundreds of calls under way, httpx looks through its whole pool for each of them, which
costs a worker more CPU than the model does.
"""

from __future__ import annotations

import asyncio
import json as json_
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from miles_tito.errors import MilesError, MissingDependency

from .backoff import delay_s

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
"""Between two sendings of one call."""


class NoAnswer(MilesError, ConnectionError):
    """No whole answer came to a call.

    Attributes:
        reason: the error of the connection, in one line.
        is_silence: the server took too long; otherwise it refused the connection or broke it off.
        resent: how often the call had been sent again.
    """

    def __init__(self, call: str, reason: str, *, is_silence: bool = False, resent: int = 0) -> None:
        super().__init__(f"{call} got no answer: {reason}")
        self.reason = reason
        self.is_silence = is_silence
        self.resent = resent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer of an HTTP server, whatever its status."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    """Names in any case."""
    resent: int = 0
    """How often the call was sent again; an earlier sending may have been served."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def excerpt(self, length: int = 300) -> str:
        """The beginning of the body, for a message."""
        return self.body[:length].decode(errors="replace").strip()

    def json(self) -> Any:
        """The body decoded; raises ValueError when it is no JSON."""
        return json_.loads(self.body)


class Http:
    """A pool of connections for asynchronous callers, opened on first use, in the event loop then running."""

    def __init__(
        self,
        *,
        silence_s: float,
        max_connections: int = 100,
        keepalive_s: float = 15.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            silence_s: longest wait for the next bytes of an answer.
            max_connections: further calls wait for a free one; 0 for any number.
            keepalive_s: idle connections are closed after this; choose it below the server's own.
        """
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependency("pip install 'miles-tito[server]'") from error
        self._aiohttp = aiohttp
        self._silence_s = silence_s
        self._max_connections = max_connections
        self._keepalive_s = keepalive_s
        self._headers = headers or {}
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        retry_for_s: float = 0.0,
        retry_header: str | None = None,
    ) -> Answer:
        """The whole answer to one call.

        Args:
            json: the body, or `data` as it is.
            timeout_s: a limit on each sending, besides that on its silence.
            retry_for_s: how long it is sent again after a broken connection; never after a silence.
            retry_header: a header that counts the sendings from the second on.

        Raises:
            NoAnswer: none came.
        """
        clock = asyncio.get_running_loop().time
        began, resent = clock(), 0
        while True:
            counted = {retry_header: str(resent)} if retry_header and resent else {}
            try:
                async with self.open(
                    method, url, json=json, data=data, headers={**(headers or {}), **counted}, timeout_s=timeout_s
                ) as response:
                    body = await response.read()
                return Answer(status=response.status, body=body, headers=response.headers, resent=resent)
            except NoAnswer as error:
                error.resent = resent
                if error.is_silence or clock() - began >= retry_for_s:
                    raise
            await asyncio.sleep(delay_s(resent, first_s=FIRST_WAIT_S, longest_s=LONGEST_WAIT_S))
            resent += 1

    @asynccontextmanager
    async def open(
        self, method: str, url: str, *, timeout_s: float | None = None, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer that is read piece by piece; `options` as `aiohttp.ClientSession.request` takes them.

        Raises:
            NoAnswer: none came, or it broke off.
        """
        if timeout_s is not None:
            options["timeout"] = self._aiohttp.ClientTimeout(total=timeout_s, sock_read=self._silence_s)
        try:
            async with self._opened().request(method, url, **options) as response:
                yield response
        except (self._aiohttp.ClientError, TimeoutError) as error:
            is_silence = isinstance(error, TimeoutError) and not isinstance(error, self._aiohttp.ConnectionTimeoutError)
            reason = f"{type(error).__name__} {error}".rstrip()
            raise NoAnswer(f"{method} {url}", reason, is_silence=is_silence) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            aiohttp = self._aiohttp
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=self._keepalive_s),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=self._silence_s),
                headers=self._headers,
                auto_decompress=True,
                trust_env=False,  # a proxy between two processes of one run is never meant
            )
        return self._session


def call_once(
    method: str, url: str, *, timeout_s: float, json: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """One call by a caller without an event loop, which opens a connection and a loop of its own for it.

    Raises:
        NoAnswer: none came within `timeout_s`.
    """

    async def calling() -> Answer:
        async with Http(silence_s=timeout_s) as http:
            return await http.call(method, url, json=json, headers=headers, timeout_s=timeout_s)

    return blocking(calling())


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, on an event loop of its own; also where another one runs, which stands still meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
