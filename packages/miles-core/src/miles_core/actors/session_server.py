"""A session server in this process, with the counters that utilisation is computed from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from miles_tito.engine.lost_requests import WatchedEngine
from miles_tito.engine.sglang import SGLangEngine
from miles_tito.server import create_app, serve
from miles_tito.tokens.tokenizer import load_tokenizer

from miles_core.monitor.metering import Counters, MeteredEngine


class SessionServer:
    """`miles_tito`'s session app on a loopback port, in front of one engine or router."""

    def __init__(
        self,
        engine_url: str,
        *,
        engines: Sequence[str],
        tokenizer: Path,
        family: str,
        model: str,
        max_context: int,
        api_key: str,
        state: Path,
    ) -> None:
        """
        Args:
            engines: those behind a router, itself for an only engine.
            state: folder for the journals of its sessions, which a server that takes its place has again.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        self._engine = MeteredEngine(WatchedEngine(SGLangEngine(engine_url, engines=engines)))
        self._app = create_app(
            engine=self._engine,
            tokenizer=load_tokenizer(tokenizer),
            family=family,
            model=model,
            max_context=max_context,
            api_key=api_key,
            state_dir=state,
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self, port: int = 0) -> str:
        """Serve; returns the base URL once requests are answered.

        Args:
            port: 0 takes a free one.
        """
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(self._app, port=port, ready=url.set_result))
        await asyncio.wait([url, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not url.done():
            await self._serving  # raises what kept it from serving
        return url.result()

    async def ended(self) -> None:
        """Returns when it no longer serves; raises why, unless it was stopped."""
        if self._serving is not None:
            await asyncio.wait([self._serving])
            if not self._serving.cancelled():
                self._serving.result()

    def hold(self, is_held: bool) -> None:
        """Keep new requests to the engines waiting, or let them go."""
        self._engine.hold(is_held)

    def counters(self) -> Counters:
        """What went through the engines since the start."""
        return self._engine.counters()

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
