"""All sessions of one server, by id, until they end."""

from __future__ import annotations

import asyncio
import time

from miles_tito.errors import RequestError

from .live_session import LiveSession, RunningTurn, digest_key


class SessionStore:
    """Holds sessions, closes those past their deadline, forgets those that nobody used for long."""

    def __init__(self, *, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[str, LiveSession] = {}
        self._by_key: dict[bytes, LiveSession] = {}
        self.num_opened = self.num_expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_turns(self) -> int:
        return sum(live.session.num_turns for live in self._sessions.values())

    @property
    def num_held_tokens(self) -> int:
        return sum(live.session.num_held_tokens for live in self._sessions.values())

    def check_free(self, session_id: str) -> None:
        """
        Raises:
            RequestError: a session of this id is open.
        """
        if session_id in self._sessions:
            raise RequestError(
                f"Session {session_id!r} is open already; close it first or choose another id.",
                status=409,
                code="session_exists",
                param="session_id",
            )

    def add(self, live: LiveSession) -> None:
        self.check_free(live.session.id)
        self._sessions[live.session.id] = self._by_key[live.key_digest] = live
        self.num_opened += 1

    def get(self, session_id: str) -> LiveSession:
        live = self._sessions.get(session_id)
        if live is None:
            raise RequestError(
                f"No session {session_id!r} here: never opened, closed, or unused for {self._idle_timeout_s:g} s.",
                status=404,
                code="session_not_found",
            )
        live.last_used = time.monotonic()
        return live

    def find(self, key: str) -> LiveSession | None:
        """The session that `key` belongs to."""
        live = self._by_key.get(digest_key(key))
        if live:
            live.last_used = time.monotonic()
        return live

    @property
    def running(self) -> list[RunningTurn]:
        """Turns at the engine."""
        return [turn for live in self._sessions.values() for turn in live.running]

    async def remove(self, session_id: str) -> None:
        live = self._sessions.pop(session_id, None)
        if live:
            del self._by_key[live.key_digest]
            await live.close("The session was closed.")
            if live.journal:
                live.journal.remove()

    async def shut_down(self) -> None:
        """Give up what runs; sessions with a journal can be restored."""
        for live in self._sessions.values():
            await live.close("The session server shuts down.")
        self._sessions.clear()
        self._by_key.clear()

    async def sweep(self) -> None:
        """One round of ending what is due."""
        now = time.monotonic()
        for session_id, live in list(self._sessions.items()):
            if live.is_due and live.closed_because is None:
                await live.close("The deadline of this session has passed.")
            idle_timeout_s = self._idle_timeout_s if live.idle_timeout_s is None else live.idle_timeout_s
            if not live.is_busy and now - live.last_used >= idle_timeout_s:
                self.num_expired += 1
                await self.remove(session_id)

    async def sweep_forever(self, every_s: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.sweep()
