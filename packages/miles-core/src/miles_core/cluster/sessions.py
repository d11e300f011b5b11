"""The session servers, an actor each."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from miles_core.metering import Counters

from . import actors
from .processes import spawn, stop_all


class SessionServers:
    """The session servers; a session lives on the one that its id hashes to."""

    def __init__(self, count: int) -> None:
        self._actors = [spawn(actors.SessionActor, concurrency=8)() for _ in range(count)]
        self.urls: list[str] = []
        self.api_key = secrets.token_urlsafe()
        """Opens sessions; other users of the machine do not have it."""

    async def start(self, engine_url: str, *, tokenizer: Path, family: str, max_context: int) -> None:
        """Serve in front of `engine_url`.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        starts = (
            actor.start.remote(
                engine_url,
                tokenizer=tokenizer,
                family=family,
                model=tokenizer.name,
                max_context=max_context,
                api_key=self.api_key,
            )
            for actor in self._actors
        )
        self.urls = list(await asyncio.gather(*starts))

    async def counters(self) -> list[Counters]:
        """Of each server."""
        return await asyncio.gather(*(actor.counters.remote() for actor in self._actors))

    async def stop(self) -> None:
        await stop_all(self._actors, what="session server")
