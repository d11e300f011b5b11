"""The routes of agents: three dialects of one conversation, below a session's path or by its key alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from miles_tito.sessions.client_headers import read_hints

from .dialects.base import Dialect, TokenUsage, TurnRequest
from .live_session import LiveSession, RecordedTurn, RunningTurn, encode
from .session_routes import json_response, token
from .session_store import OWN, SessionService
from .turn_answers import TurnAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRoutes:
    """Endpoints of agents. They raise errors of Miles, which the application turns into answers."""

    service: SessionService

    async def ask(self, request: Request, dialect: Dialect) -> ASGIApp:
        """One turn."""
        began = time.perf_counter()
        service = self.service
        live = self._session(request)
        asked, writer = dialect.read(await request.body(), live.session.sampling, service.model)
        answer = await live.start(asked, service.engine, hints=read_hints(request.headers), metrics=service.metrics)
        node = answer.node
        prompt = node.num_ids - len(node.completion_ids)
        writer.start(rid=node.rid, model=service.model, usage=TokenUsage(prompt_tokens=prompt))
        service.metrics.time("added_seconds", time.perf_counter() - began)
        return TurnAnswer(
            live=live,
            turn=answer,
            dialect=dialect,
            writer=writer,
            stream=asked.stream,
            wants_logprobs=asked.wants_logprobs,
            headers=_headers(live, answer, asked),
            metrics=service.metrics,
        )

    async def count(self, request: Request, dialect: Dialect) -> Response:
        """The tokens that a request would put before the model."""
        session = self._session(request).session
        asked, _ = dialect.read(await request.body(), session.sampling, self.service.model)
        hints = read_hints(request.headers)
        plan = session.plan(asked.messages, tools=asked.tools, variables=asked.variables, hints=hints)
        return json_response({"input_tokens": session.num_ids(plan, await encode(session, plan))})

    async def models(self, request: Request) -> Response:
        """The one model, as both OpenAI and Anthropic list it."""
        self._session(request)
        model = {
            "id": self.service.model,
            "object": "model",
            "type": "model",
            "display_name": self.service.model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "miles",
        }
        page = {"first_id": self.service.model, "last_id": self.service.model, "has_more": False}
        return json_response({"object": "list", "data": [model], **page})

    async def head(self, request: Request) -> Response:
        """Clients look whether anybody is there, without a key."""
        return Response()

    def _session(self, request: Request) -> LiveSession:
        return self.service.find(request.path_params.get("session_id", OWN), token(request), operator=False)


def _headers(live: LiveSession, answer: RecordedTurn | RunningTurn, asked: TurnRequest) -> dict[str, str]:
    node = answer.node
    matched = node.parent.num_messages if node.parent else 0
    headers = {
        "x-miles-session": live.session.id,
        "x-miles-turn": str(node.id),
        "x-miles-trajectory": f"{live.session.id}:{node.branch}",
        "x-miles-kind": str(node.kind),
        "x-miles-matched": f"{matched}/{len(asked.messages)}",
        "request-id": node.rid,
    }
    if asked.pinned:
        headers["x-miles-pinned"] = ",".join(asked.pinned)
    if asked.left_out:
        headers["x-miles-left-out"] = ",".join(asked.left_out)
    return headers
