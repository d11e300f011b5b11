"""The session servers, a process each, started again at their address with their sessions when they die."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from miles_tito.shared.ports import port_of

from miles_core.actors.session_server import SessionServer, SessionSettings
from miles_core.monitor.usage import Counters

from .remote import OnEvent, ProcessDied, Remote, Resources, stop_all


class SessionServers:
    """The session servers of a run; a session lives on the one that its id hashes to.

    They start behind the engines and in front of the workers; the fleet of the engines watches and pauses them.
    """

    def __init__(self, count: int, *, state: Path, on_event: OnEvent) -> None:
        """
        Args:
            state: folder of this run for the journals of open sessions.
            on_event: called when a server died and is started again.
        """
        self._state = state
        self._servers = [_Server(f"server-{index}", on_event) for index in range(count)]
        self._on_event = on_event
        self._is_paused = False
        self._settings: SessionSettings | None = None
        self.api_key = secrets.token_urlsafe()
        """Opens sessions; other users of the machine do not have it."""

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    async def start(
        self, engine_url: str, *, engines: Sequence[str], tokenizer: Path, family: str, max_context: int
    ) -> None:
        """Serve in front of `engine_url`, the router of `engines` or the only one.

        Raises:
            TemplateError: the chat template cannot be joined append-only.
        """
        shutil.rmtree(self._state, ignore_errors=True)  # sessions of an earlier start; their episodes run anew
        self._settings = SessionSettings(
            engine_url=engine_url,
            engines=tuple(engines),
            tokenizer=tokenizer,
            family=family,
            model=tokenizer.name,
            max_context=max_context,
            api_key=self.api_key,
            state=self._state,
        )
        await asyncio.gather(*(self._start(server) for server in self._servers))

    async def watch(self) -> None:
        """Keep every server running.

        Raises:
            ProcessLostError: one dies again and again.
        """
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(self._keep(server))

    async def pause(self, is_paused: bool) -> None:
        """Let the requests of all sessions to the engines wait, or go."""
        self._is_paused = is_paused
        await asyncio.gather(*(server.pause(is_paused) for server in self._servers if server.url))

    async def counters(self) -> list[Counters]:
        """Of each server, with what those counted that it took the place of."""
        return await asyncio.gather(*(server.counters() for server in self._servers))

    async def stop(self) -> None:
        await stop_all([server.process for server in self._servers])

    async def _start(self, server: _Server) -> None:
        assert self._settings is not None, "start() comes first"
        settings = replace(self._settings, state=self._state / server.name)
        server.url = await server.process.call("start", settings, port_of(server.url) if server.url else 0)
        server.process.name = server.url
        await server.pause(self._is_paused)  # it may have changed meanwhile

    async def _keep(self, server: _Server) -> None:
        while True:
            await server.process.backoff(await server.process.ended("ended"))
            server.replace()
            try:
                await self._start(server)
            except (ProcessDied, OSError) as error:
                self._on_event("session server", server.url, f"did not start: {error}")


class _Server:
    """One session server, whatever becomes of its process."""

    def __init__(self, name: str, on_event: OnEvent) -> None:
        self.name = name
        self.url = ""
        self.process = Remote(
            SessionServer, kind="session server", resources=Resources(concurrency=16), on_event=on_event
        )
        self._last = self._before = Counters()
        self.process.spawn()

    def replace(self) -> None:
        """A new process, which counts from 0."""
        self._before = self._last
        self.process.spawn()

    async def pause(self, is_paused: bool) -> None:
        with suppress(ProcessDied):  # its successor learns of it when it is up
            await self.process.call("pause", is_paused)

    async def counters(self) -> Counters:
        """What went through it, and through those before it, since the start."""
        with suppress(ProcessDied):
            now: Counters = await self.process.call("counters")
            self._last = now.after(self._before)
        return self._last
