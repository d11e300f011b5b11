"""The routes of agents: three dialects of one conversation, below a session's path or by its key alone.

An answer goes out whole or in events, is given up when the client leaves, and is marked once it is delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_tito.errors import EngineError, MilesError, RecordError, RequestError, TemplateError
from miles_tito.sessions.tree import Node
from miles_tito.sessions.turn_kinds import read_hints
from miles_tito.tokens.tokenizer import Tokenizer

from .dialects.base import AnswerWriter, Dialect, Ending, SampledToken, TokenUsage, TurnRequest
from .live_session import LiveSession, RecordedTurn, RunningTurn, encode
from .metrics import Metrics
from .session_routes import JSON, json_response, token
from .session_store import OWN, SessionService

_HOLD_HEAD_S = 5.0
"""How long the head of a stream waits for the first token, so that an early failure still has a status of its own."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRoutes:
    """Endpoints of agents. They raise errors of Miles, which the application turns into answers."""

    service: SessionService

    async def ask(self, request: Request, dialect: Dialect) -> ASGIApp:
        """One turn."""
        began = time.perf_counter()
        service = self.service
        live = self._session(request)
        asked, new_writer = dialect.read(await request.body(), live.session.sampling, service.model)
        answer = await live.start(asked, service.engine, hints=read_hints(request.headers), metrics=service.metrics)
        node = answer.node
        usage = TokenUsage(prompt_tokens=node.num_ids - len(node.completion_ids))
        service.metrics.time("added_seconds", time.perf_counter() - began)
        return TurnAnswer(
            live=live,
            turn=answer,
            dialect=dialect,
            writer=new_writer(node.rid, service.model, usage),
            asked=asked,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """The answer to one request as an ASGI application, whole or in events; given up when the client leaves."""

    live: LiveSession
    turn: RecordedTurn | RunningTurn
    dialect: Dialect
    writer: AnswerWriter
    asked: TurnRequest
    headers: dict[str, str]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.turn.attached():
            work = self._send_events(send) if self.asked.stream else self._send_whole(scope, receive, send)
            if await unless_disconnected(receive, work) is None:
                self.metrics.add("turns_not_recorded_total", reason="client_left")

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> bool:
        try:
            node = await self.turn.result()
        except MilesError as error:
            await self._refuse(error)(scope, receive, send)
            return True
        body = self.writer.whole(node.message, self._ending(node))
        await Response(body, media_type=JSON, headers=self.headers)(scope, receive, send)
        self.live.delivered(node)
        return True

    async def _send_events(self, send: Send) -> bool:
        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async with asyncio.timeout(_HOLD_HEAD_S):
                await self.turn.begun()
                if self.turn.has_failed:
                    await self.turn.result()
        except TimeoutError:
            pass
        except MilesError as error:
            await self._refuse(error)({"type": "http"}, _nothing, send)
            return True
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
        await write(self.writer.opening())
        async for pieces in self.turn.pieces():
            await write(self.writer.pieces(pieces) if pieces else self.writer.ping())
        try:
            node = await self.turn.result()
        except MilesError as error:
            problem = as_problem(error)
            self.metrics.add("turns_not_recorded_total", reason=problem.code)
            await write(self.writer.failure(problem), more=False)
            return True
        await write(self.writer.closing(self._ending(node)), more=False)
        self.live.delivered(node)
        return True

    def _ending(self, node: Node) -> Ending:
        assert node.finish_reason is not None, f"turn {node.id} is answered before it ended"
        usage = TokenUsage(
            prompt_tokens=node.num_ids - len(node.completion_ids),
            completion_tokens=len(node.completion_ids),
            cached_tokens=self.turn.cached_tokens,
        )
        tokens = _sampled(node, self.live.session.joiner.tokenizer) if self.asked.wants_logprobs else None
        return Ending(finish=node.finish_reason, stop_string=node.stop_string, usage=usage, tokens=tokens)

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {**self.headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return [(key.encode(), value.encode()) for key, value in headers.items()]

    def _refuse(self, error: MilesError) -> Response:
        self.metrics.add("turns_not_recorded_total", reason=as_problem(error).code)
        return refusal(error, self.dialect)


def refusal(error: MilesError, dialect: Dialect) -> Response:
    """`error` as an answer in the dialect's own shape."""
    problem = as_problem(error)
    return Response(msgspec.json.encode(dialect.error(problem)), status_code=problem.status, media_type=JSON)


def as_problem(error: MilesError) -> RequestError:
    """Any error of ours as one with a status."""
    match error:
        case RequestError():
            return error
        case EngineError(status=400):
            return RequestError(str(error), code="engine_refused")
        case EngineError():
            return RequestError(str(error), status=503 if error.retryable else 502, code="engine_error")
        case RecordError():
            return RequestError(str(error), status=422, code="invalid_record")
        case TemplateError():
            return RequestError(str(error), code="template_refuses")
        case _:
            return RequestError(str(error), status=500, code="internal_error")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client left first; `work` is cancelled then."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


def _sampled(node: Node, tokenizer: Tokenizer) -> tuple[SampledToken, ...]:
    pairs = zip(node.completion_ids.tolist(), node.logprobs.tolist(), strict=True)
    rows = [(tokenizer.token_bytes(token_id), logprob) for token_id, logprob in pairs]
    return tuple(SampledToken(text=data.decode(errors="replace"), data=data, logprob=lp) for data, lp in rows)
