"""The sessions of one server: opened, found by who may see them, and restored."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from miles_tito.engine.generation import Engine
from miles_tito.errors import RequestError
from miles_tito.records import Sampling
from miles_tito.sessions.journal import Opened, Saved, StateDir
from miles_tito.sessions.session import Session
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import value_key
from miles_tito.tokens.tokenizer import Tokenizer

from .live_session import LiveSession, RunningTurn, digest_key
from .metrics import Metrics

_log = logging.getLogger(__name__)

OWN = "self"
"""Stands for the session of the bearer token where a path wants an id."""


@dataclass(frozen=True, kw_only=True)
class SessionService:
    """What the routes of one server share: its engine, its sessions, and who may see which."""

    engine: Engine
    tokenizer: Tokenizer
    joiner: Joiner
    model: str
    max_context: int
    sampling: Sampling
    api_key: str | None
    store: SessionStore
    state: StateDir | None
    metrics: Metrics = field(default_factory=Metrics)
    _joiners: dict[str, Joiner] = field(default_factory=dict[str, Joiner])
    """Of families that sessions asked for."""

    def open(
        self,
        *,
        session_id: str | None = None,
        api_key: str | None = None,
        family: str | None = None,
        sampling: Sampling | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        ttl_s: float | None = None,
    ) -> tuple[LiveSession, str]:
        """A new session and its key.

        Raises:
            RequestError: the id is taken or no id, or the family is unknown.
            TemplateError: the family does not fit the tokenizer.
        """
        session_id = session_id or f"ses-{secrets.token_hex(12)}"
        api_key = api_key or secrets.token_urlsafe(24)
        opened = Opened(
            session_id=session_id,
            key_digest=digest_key(api_key),
            fingerprint=self.fingerprint,
            family=family,
            opened_at=datetime.now().astimezone().isoformat(),
            deadline_at=None if deadline_s is None else time.time() + deadline_s,
            ttl_s=ttl_s,
            sampling=sampling or self.sampling,
            tools=list(tools),
            metadata=dict(metadata or {}),
        )
        live = self._live(opened)
        self.store.check_free(session_id)
        live.journal = self.state.create(opened) if self.state else None
        self.store.add(live)
        return live, api_key

    def find(self, session_id: str, token: str, *, operator: bool) -> LiveSession:
        """The session `session_id`, for its own key or (where `operator`) for the server's.

        Raises:
            RequestError: there is none for this token.
        """
        if session_id == OWN:
            return self.find_by_key(token)
        if operator and self.is_operator(token):
            return self.store.get(session_id)
        live = self.store.find(token)
        if live is None or live.session.id != session_id:
            # One answer for both: whoever lacks the key does not learn which sessions exist.
            raise RequestError(
                f"No session {session_id!r} for this bearer token: it was closed, has expired, or the token is another "
                "session's.",
                status=401,
                code="invalid_api_key",
            )
        return live

    def find_by_key(self, token: str) -> LiveSession:
        """The session of a bearer token; where anybody may open sessions, it is opened by its first use.

        Raises:
            RequestError: the token is nobody's.
        """
        live = self.store.find(token)
        if live:
            return live
        if not token or self.api_key is not None:
            raise RequestError(
                "No session has this bearer token; open one with POST /sessions and use its `api_key`.",
                status=401,
                code="invalid_api_key",
            )
        digest = hashlib.blake2b(token.encode(), digest_size=12).hexdigest()
        return self.open(session_id=f"key-{digest}", api_key=token)[0]

    def is_operator(self, token: str) -> bool:
        """Whether `token` is the server's own key."""
        return self.api_key is not None and hmac.compare_digest(self.api_key.encode(), token.encode())

    def restore(self) -> list[str]:
        """Take over the sessions that an earlier server left; the ids of the calls that it had at the engine."""
        interrupted: list[str] = []
        for saved in self.state.read(self.fingerprint) if self.state else ():
            self.store.add(self._restored(saved))
            interrupted += saved.interrupted
        if len(self.store):
            _log.info("Restored %d sessions with %d turns.", len(self.store), self.store.num_turns)
        return interrupted

    @cached_property
    def fingerprint(self) -> bytes:
        """Of what the recorded ids depend on."""
        template = self.tokenizer.template.source if self.tokenizer.template else ""
        return value_key([self.joiner.family.name, self.tokenizer.vocab_size, list(self.tokenizer.eos_ids), template])

    def _restored(self, saved: Saved) -> LiveSession:
        live = self._live(saved.opened)
        live.journal = saved.journal
        lost = len(saved.interrupted)
        live.session.restore(
            saved.nodes,
            next_id=saved.next_id,
            next_branch=saved.next_branch,
            discarded=saved.num_given_up + lost,
        )
        if lost:
            _log.warning(
                "Session %s: %d turns were under way when the last server ended; their clients must ask again.",
                live.session.id,
                lost,
            )
        return live

    def _live(self, opened: Opened) -> LiveSession:
        joiner = self.joiner
        if opened.family is not None and opened.family != joiner.family.name:
            joiner = self._joiners.setdefault(
                opened.family, Joiner(self.tokenizer, choose_family(opened.family, self.tokenizer))
            )
        session = Session(
            opened.session_id,
            joiner,
            max_context=self.max_context,
            sampling=opened.sampling,
            tools=opened.tools,
            metadata=opened.metadata,
            now=datetime.fromisoformat(opened.opened_at),
        )
        return LiveSession(
            session, key_digest=opened.key_digest, deadline_at=opened.deadline_at, idle_timeout_s=opened.ttl_s
        )


class SessionStore:
    """All open sessions by id and by key; once a second it ends those past their deadline and removes unused ones."""

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
            if not live.running and now - live.last_used >= idle_timeout_s:
                self.num_expired += 1
                await self.remove(session_id)

    async def sweep_forever(self, every_s: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.sweep()
