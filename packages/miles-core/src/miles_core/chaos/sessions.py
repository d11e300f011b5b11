"""The session server without its HTTP: real sessions that record real turns, and faults where the network would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from miles_tito.errors import EngineError, SessionError
from miles_tito.records import Message, Policy, Sampling, Trajectory
from miles_tito.server.dialects.base import TurnRequest
from miles_tito.server.live_session import LiveSession, as_request_error, digest_key
from miles_tito.server.session_store import SessionStore
from miles_tito.sessions.session import Session

from miles_core.monitor.metering import Counters, MeteredEngine

from . import language
from .engines import Router
from .world import World

NETWORK_S = 0.2


class ScriptedSessions:
    """Implements `miles_core.parts.Sessions` for the run and `miles_rollout.worker.Sessions` for its workers."""

    def __init__(self, world: World, router: Router) -> None:
        self._world = world
        self._engine = MeteredEngine(router)
        self._store = SessionStore(idle_timeout_s=1e9)
        self._max_context = 0

    async def start(self, engine_url: str, *, tokenizer: Path, family: str, max_context: int) -> None:
        self._max_context = max_context

    async def counters(self) -> list[Counters]:
        return [self._engine.counters()]

    async def stop(self) -> None:
        await self._store.shut_down()

    @property
    def num_open(self) -> int:
        return len(self._store)

    # ---- for workers

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> Policy:
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
        return Policy(
            base_url="scripted", api_key=session_id, model="scripted", sampling=sampling, session_id=session_id
        )

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        await self._call()
        return self._live(session_id).session.trajectories()

    async def close(self, session_id: str) -> None:
        await self._call()
        await self._store.remove(session_id)

    # ---- for environments

    async def chat(self, session_id: str, messages: Sequence[Message], *, max_tokens: int) -> Message:
        """The policy's reply, recorded; the turn is given up if the caller leaves.

        Raises:
            RequestError: as the server would answer.
        """
        await self._call()
        live = self._live(session_id)
        request = TurnRequest(messages=tuple(messages), variables={}, max_tokens=max_tokens)
        answer = await live.start(request, self._engine)
        with answer.attached():
            try:
                node = await answer.result()
            except EngineError as error:
                raise as_request_error(error) from error
            live.delivered(node)
            return node.message

    async def _call(self) -> None:
        """One request over the network."""
        await self._world.wait(NETWORK_S)
        fault = self._world.fault("session_error", "sessions_lost")
        if fault is None:
            return
        if fault.kind == "sessions_lost":
            await self._store.shut_down()
        raise SessionError("the session server got no answer: connection reset")

    def _live(self, session_id: str) -> LiveSession:
        return self._store.get(session_id)
