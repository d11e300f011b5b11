"""Session servers without HTTP: real sessions that record real turns, and faults where the network would be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from miles_core.actors.session_server import SessionSettings
from miles_core.monitor.usage import Counters, MeteredEngine
from miles_tito.errors import EngineError, SessionError
from miles_tito.records import Message, Policy, Sampling, Trajectory
from miles_tito.server.dialects.base import TurnRequest
from miles_tito.server.live_session import LiveSession, digest_key
from miles_tito.server.session_store import SessionStore
from miles_tito.server.turn_routes import as_problem
from miles_tito.sessions.session import Session

from . import language
from .engines import ScriptedPath
from .world import World

FIRST_PORT = 7000
NETWORK_S = 0.2


class ScriptedSessionServer:
    """Answers like `miles_core.actors.session_server.SessionServer`; one that takes its place has no sessions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = SessionStore(idle_timeout_s=1e9)
        self._engine: MeteredEngine | None = None
        self._max_context = 0
        self.kill: Callable[[], None] = lambda: None
        """Ends its process."""

    # ---- for the run

    async def start(self, settings: SessionSettings, port: int) -> str:
        servers = self._world.session_servers
        url = f"http://127.0.0.1:{port or FIRST_PORT + len(servers)}"
        servers[url] = self
        self._engine = MeteredEngine(ScriptedPath(self._world, settings.engine_url))
        self._max_context = settings.max_context
        return url

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def pause(self, is_paused: bool) -> None:
        if self._engine is not None:
            self._engine.pause(is_paused)

    async def counters(self) -> Counters:
        return Counters() if self._engine is None else self._engine.counters()

    async def stop(self) -> None:
        await self._store.shut_down()

    def died(self) -> None:
        """Nobody answers at its address, and the turns that ran here are over."""
        self._engine = None
        if self.num_open:
            self._closing = asyncio.ensure_future(self._store.shut_down())

    @property
    def num_open(self) -> int:
        return len(self._store)

    # ---- for those who talk to it

    async def open(self, session_id: str, sampling: Sampling, metadata: Mapping[str, object] | None) -> None:
        await self._call()
        self._world.record.add("opened", session=session_id, start=self._world.start)
        session = Session(
            session_id,
            language.joiner(),
            max_context=self._max_context,
            sampling=sampling,
            metadata=metadata,
            now=datetime.fromtimestamp(0, UTC),
        )
        self._store.add(LiveSession(session, key_digest=digest_key(session_id)))

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        await self._call()
        return self._live(session_id).session.trajectories()

    async def close(self, session_id: str) -> None:
        await self._call()
        await self._store.remove(session_id)

    async def chat(self, session_id: str, messages: Sequence[Message], *, max_tokens: int) -> Message:
        """The policy's reply, recorded; the turn is given up if the caller leaves.

        Raises:
            RequestError: as the server would answer.
        """
        await self._call()
        live = self._live(session_id)
        request = TurnRequest(messages=tuple(messages), variables={}, max_tokens=max_tokens)
        assert self._engine is not None, "_call looks"
        answer = await live.start(request, self._engine)
        with answer.attached():
            try:
                node = await answer.result()
            except EngineError as error:
                raise as_problem(error) from error
            live.delivered(node)
            return node.message

    async def _call(self) -> None:
        """One request over the network."""
        await self._world.wait(NETWORK_S)
        fault = self._world.fault("session_error", "sessions_lost")
        if fault is not None and fault.kind == "sessions_lost":
            self.kill()
        if fault is not None or self._engine is None:
            raise SessionError("the session server got no answer: connection reset")

    def _live(self, session_id: str) -> LiveSession:
        return self._store.get(session_id)


class ScriptedSessionClient:
    """Answers like `miles_tito.client.SessionClient`; a session lives on the server that the dice say."""

    def __init__(self, world: World, urls: Sequence[str]) -> None:
        self._world = world
        self._urls = urls

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> Policy:
        url = self._url(session_id)
        await self._world.session_servers[url].open(session_id, sampling, metadata)
        return Policy(base_url=url, api_key=session_id, model="scripted", sampling=sampling, session_id=session_id)

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        return await self._server(session_id).trajectories(session_id)

    async def close(self, session_id: str) -> None:
        await self._server(session_id).close(session_id)

    async def aclose(self) -> None:
        return None

    def _server(self, session_id: str) -> ScriptedSessionServer:
        return self._world.session_servers[self._url(session_id)]

    def _url(self, session_id: str) -> str:
        return self._urls[int(self._world.dice("session", session_id) * len(self._urls))]
