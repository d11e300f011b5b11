"""A session server on the event loop of its process, with the counters that utilisation is computed from."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import uvicorn
from miles_tito.engine import SGLangEngine
from miles_tito.server import create_app
from miles_tito.tokenizer import load_tokenizer

from .metering import Counters, MeteredEngine


class SessionServer:
    """`miles_tito`'s session app behind uvicorn, on a free loopback port."""

    def __init__(self, *, tokenizer: Path, family: str, model: str, max_context: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._family = family
        self._model = model
        self._max_context = max_context
        self._engine: MeteredEngine | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, engine_url: str) -> str:
        """Serve; returns the base URL once the socket listens."""
        self._engine = MeteredEngine(SGLangEngine(engine_url))
        app = create_app(
            engine=self._engine,
            tokenizer=self._tokenizer,
            family=self._family,
            model=self._model,
            max_context=self._max_context,
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="on")
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise RuntimeError("the session server ended before it listened")
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def counters(self) -> Counters:
        """What went through the engines since the start."""
        assert self._engine is not None, "start() comes first"
        return self._engine.counters()

    async def stop(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
