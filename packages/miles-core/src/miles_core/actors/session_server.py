"""A session server in this process, with the counters that utilisation is computed from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from miles_tito.engine.lost_requests import WatchedEngine
from miles_tito.engine.sglang import SGLangEngine
from miles_tito.server import create_app, serve
from miles_tito.tokens.tokenizer import load_tokenizer

from miles_core.monitor.usage import Counters, MeteredEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What one session server serves with."""

    engine_url: str
    """Where requests go: the router, or the only engine."""
    engines: tuple[str, ...]
    """Those behind a router, itself for an only engine."""
    tokenizer: Path
    family: str
    model: str
    max_context: int
    api_key: str
    """Opens sessions."""
    state: Path
    """Folder for the journals of its sessions, which a server that takes its place has again."""


class SessionServer:
    """`miles_tito`'s session app on a loopback port, in front of one engine or router.

    `SessionServers` keeps each one in a process of its own; agents of the run's environments talk to it over HTTP.
    """

    def __init__(self) -> None:
        self._engine: MeteredEngine | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, settings: SessionSettings, port: int = 0) -> str:
        """Serve; returns the base URL once requests are answered.

        Args:
            port: 0 takes a free one.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        self._engine = MeteredEngine(WatchedEngine(SGLangEngine(settings.engine_url, engines=settings.engines)))
        app = create_app(
            engine=self._engine,
            tokenizer=load_tokenizer(settings.tokenizer),
            family=settings.family,
            model=settings.model,
            max_context=settings.max_context,
            api_key=settings.api_key,
            state_dir=settings.state,
        )
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(app, port=port, ready=url.set_result))
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

    async def pause(self, is_paused: bool) -> None:
        """Keep new requests to the engines waiting, or let them go."""
        if self._engine is not None:
            self._engine.pause(is_paused)

    async def counters(self) -> Counters:
        """What went through the engines since the start."""
        return Counters() if self._engine is None else self._engine.counters()

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
