"""Serves a session application on a socket with uvicorn, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.applications import Starlette

from .session_store import SessionStore

_log = logging.getLogger(__name__)


async def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] | None = None,
    signals: bool = False,
    grace_s: float = 2.0,
) -> None:
    """Serve `app` until cancelled (or, with `signals`, until Ctrl-C or SIGTERM).

    Args:
        port: 0 takes a free one.
        ready: called with the URL as soon as requests are answered.
        signals: take over the process's signal handlers; leave that to the process's owner otherwise.
        grace_s: how long turns under way may take to finish when it ends; then they are aborted.
    """
    sock = _listen(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=300,  # a client between two turns waits for a tool; a closed connection would surprise it
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Uvicorn(config, ready=lambda: ready(url) if ready else None, signals=signals)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await task
        raise
    finally:
        sock.close()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # asyncio sets TCP_NODELAY only where the protocol is named; without it, each answer takes 40 ms more.
    sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


class _Uvicorn(uvicorn.Server):
    """uvicorn that reports when it is up and what became of running turns at its end, and may leave signals alone."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], signals: bool) -> None:
        super().__init__(config)
        self._ready = ready
        self._signals = signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        store = getattr(getattr(self.config.app, "state", None), "sessions", None)
        running = store.running if isinstance(store, SessionStore) else []
        await super().shutdown(sockets)
        finished = [turn for turn in running if turn.node.is_done]
        if running:
            aborted = [turn.node.rid for turn in running if not turn.node.is_done]
            _log.warning(
                "Shut down with %d turns under way: %d finished, %d aborted%s.",
                len(running),
                len(finished),
                len(aborted),
                f" ({', '.join(aborted)})" if aborted else "",
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield
