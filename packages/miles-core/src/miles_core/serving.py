"""A session server in this process, with the counters that utilisation is computed from."""

from __future__ import annotations

import asyncio
from pathlib import Path

from miles_tito.engine import SGLangEngine
from miles_tito.server import create_app, serve
from miles_tito.tokenizer import load_tokenizer

from .metering import Counters, MeteredEngine


class SessionServer:
    """`miles_tito`'s session app on a free loopback port, in front of one engine or router."""

    def __init__(
        self, engine_url: str, *, tokenizer: Path, family: str, model: str, max_context: int, api_key: str
    ) -> None:
        """
        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        self._engine = MeteredEngine(SGLangEngine(engine_url))
        self._app = create_app(
            engine=self._engine,
            tokenizer=load_tokenizer(tokenizer),
            family=family,
            model=model,
            max_context=max_context,
            api_key=api_key,
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve; returns the base URL once requests are answered."""
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(self._app, ready=url.set_result))
        await asyncio.wait([url, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not url.done():
            await self._serving  # raises what kept it from serving
        return url.result()

    def counters(self) -> Counters:
        """What went through the engines since the start."""
        return self._engine.counters()

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
