"""The HTTP sessions of this package's clients.

aiohttp rather than httpx: with hundreds of calls under way, httpx looks through its whole pool for each of them, which
costs a worker more CPU than the model does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_tito.errors import MissingDependency

if TYPE_CHECKING:
    import aiohttp


class Http:
    """One pool of connections, made on first use, since it belongs to the event loop that is running then."""

    def __init__(
        self, *, silence_s: float, max_connections: int, keepalive_s: float, headers: dict[str, str] | None = None
    ) -> None:
        """
        Args:
            silence_s: longest wait for the next bytes of an answer.
            max_connections: further calls wait for a free one.
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
        self.timeout_error: tuple[type[Exception], ...] = (aiohttp.SocketTimeoutError,)
        self.error: tuple[type[Exception], ...] = (aiohttp.ClientError, TimeoutError)
        """What a call raises when no whole answer came; `timeout_error` among them."""

    def request(self, method: str, url: str, **options: Any) -> Any:
        """An asynchronous context manager that gives the response, as `aiohttp.ClientSession.request` does."""
        return self._opened().request(method, url, **options)

    def timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        """A limit on one whole call, instead of on its silence."""
        return self._aiohttp.ClientTimeout(total=seconds)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

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
