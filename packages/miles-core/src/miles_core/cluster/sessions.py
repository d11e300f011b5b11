"""The session servers, an actor each, started again at their address with their sessions when they die."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from miles_core.monitor.metering import Counters
from miles_core.parts import Note

from . import actors
from .processes import spawn, stop_all
from .respawn import Respawns, ended


class SessionServers:
    """The session servers; a session lives on the one that its id hashes to."""

    def __init__(self, count: int, *, state: Path, engines: Callable[[], Sequence[str]]) -> None:
        """
        Args:
            state: folder of this run for the journals of open sessions.
            engines: the urls of all engines, once they are started.
        """
        self._state = state
        self._engines = engines
        self._servers = [_Server() for _ in range(count)]
        self._is_held = False
        self._options: dict[str, Any] = {}
        self.api_key = secrets.token_urlsafe()
        """Opens sessions; other users of the machine do not have it."""

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    async def start(self, engine_url: str, *, tokenizer: Path, family: str, max_context: int) -> None:
        """Serve in front of `engine_url`.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        shutil.rmtree(self._state, ignore_errors=True)  # sessions of an earlier start; their episodes run anew
        self._options = {
            "engine_url": engine_url,
            "engines": list(self._engines()),
            "tokenizer": tokenizer,
            "family": family,
            "model": tokenizer.name,
            "max_context": max_context,
            "api_key": self.api_key,
        }
        await asyncio.gather(*(self._start(index) for index in range(len(self._servers))))

    async def watch(self, note: Note) -> None:
        """Keep every server running.

        Raises:
            PartLostError: one dies again and again.
        """
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._servers)):
                tasks.create_task(self._keep(index, note))

    async def hold(self, is_held: bool) -> None:
        """Let the requests of all sessions to the engines wait, or go."""
        self._is_held = is_held
        results = await asyncio.gather(
            *(server.actor.hold.remote(is_held) for server in self._servers if server.url), return_exceptions=True
        )
        for result in results:
            # A server that is being started is told when it is up.
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise result

    async def counters(self) -> list[Counters]:
        """Of each server, with what those counted that it took the place of."""
        return await asyncio.gather(*(server.read() for server in self._servers))

    async def stop(self) -> None:
        await stop_all([server.actor for server in self._servers], what="session server")

    async def _start(self, index: int) -> None:
        server = self._servers[index]
        options = self._options | {"state": self._state / f"server-{index}"}
        server.url = await server.actor.start.remote(_port(server.url), options)
        await server.actor.hold.remote(self._is_held)

    async def _keep(self, index: int, note: Note) -> None:
        server = self._servers[index]
        respawns = Respawns("session server", server.url)
        while True:
            why = await ended(server.actor.ended.remote())
            await respawns.after(why, note)
            server.replace()
            try:
                await self._start(index)
            except (RayActorError, OSError) as error:
                note("session server", server.url, f"did not start: {error}")


class _Server:
    """One session server, whatever becomes of its actor."""

    def __init__(self) -> None:
        self.url = ""
        self.actor = _make()
        self._last = self._before = Counters()

    def replace(self) -> None:
        ray.kill(self.actor)
        self._before = self._last
        self.actor = _make()

    async def read(self) -> Counters:
        """What went through it, and through those before it, since the start."""
        actor = self.actor
        try:
            now: Counters = await actor.counters.remote()
        except RayActorError:
            return self._last
        self._last = now.after(self._before)
        return self._last


def _make() -> Any:
    return spawn(actors.SessionActor, concurrency=16)()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2]) if url else 0
