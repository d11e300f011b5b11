"""What one server holds: its engine, its sessions, and who may see which."""

from __future__ import annotations

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

from .live_session import LiveSession, digest_key
from .metrics import Metrics
from .session_store import SessionStore

_log = logging.getLogger(__name__)

OWN = "self"
"""Stands for the session of the bearer token where a path wants an id."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Opens, finds and restores sessions."""

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
        session = self._session(opened)
        self.store.check_free(session_id)
        journal = self.state.create(opened) if self.state else None
        live = LiveSession(
            session,
            key_digest=opened.key_digest,
            deadline_at=opened.deadline_at,
            idle_timeout_s=ttl_s,
            journal=journal,
        )
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
        opened = saved.opened
        session = self._session(opened)
        lost = len(saved.interrupted)
        session.restore(
            saved.nodes,
            next_id=saved.next_id,
            next_branch=saved.next_branch,
            discarded=saved.num_given_up + lost,
        )
        if lost:
            _log.warning(
                "Session %s: %d turns were under way when the last server ended; their clients must ask again.",
                session.id,
                lost,
            )
        return LiveSession(
            session,
            key_digest=opened.key_digest,
            deadline_at=opened.deadline_at,
            idle_timeout_s=opened.ttl_s,
            journal=saved.journal,
        )

    def _session(self, opened: Opened) -> Session:
        joiner = self.joiner
        if opened.family is not None and opened.family != joiner.family.name:
            joiner = self._joiners.setdefault(
                opened.family, Joiner(self.tokenizer, choose_family(opened.family, self.tokenizer))
            )
        return Session(
            opened.session_id,
            joiner,
            max_context=self.max_context,
            sampling=opened.sampling,
            tools=opened.tools,
            metadata=opened.metadata,
            now=datetime.fromisoformat(opened.opened_at),
        )

    @cached_property
    def _joiners(self) -> dict[str, Joiner]:
        """Of families that sessions asked for."""
        return {}
