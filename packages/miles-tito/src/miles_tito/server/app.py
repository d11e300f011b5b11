"""The session server: agents talk their own dialect to it, it talks token ids to an engine and records them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from miles_tito.engine.generation import Engine
from miles_tito.errors import MilesError, RequestError
from miles_tito.records import Sampling
from miles_tito.sessions.journal import StateDir
from miles_tito.tokens.families import Family
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.tokenizer import Tokenizer

from .dialects.base import Dialect
from .dialects.chat import CHAT, ChatRequest
from .dialects.messages_request import COUNT_TOKENS, MESSAGES, CountRequest, MessagesRequest
from .dialects.responses_request import RESPONSES, ResponsesRequest
from .session_routes import SamplesRequest, SessionRequest, SessionRoutes, json_response
from .session_store import SessionService, SessionStore
from .turn_routes import TurnRoutes, refusal

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

_ASKS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "chat/completions": ("One turn in OpenAI's chat dialect.", ChatRequest),
    "responses": ("One turn in OpenAI's responses dialect.", ResponsesRequest),
    "messages": ("One turn in Anthropic's messages dialect.", MessagesRequest),
    "messages/count_tokens": ("The tokens that a request would put before the model.", CountRequest),
}
_ANSWERS = {
    "400": "Refused.",
    "401": "Not your session.",
    "404": "No such session.",
    "409": "The id is taken.",
    "410": "The session has ended.",
    "422": "Not trainable.",
    "502": "The engine failed.",
    "503": "The engine is not there.",
}


def create_app(
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    family: Family | str,
    model: str,
    max_context: int,
    default_sampling: Sampling | None = None,
    api_key: str | None = None,
    idle_timeout_s: float = 3600.0,
    state_dir: str | Path | None = None,
) -> Starlette:
    """The ASGI application; it closes `engine` when it shuts down.

    Args:
        family: a name, or "auto" to prove the template append-only and read the rest off it.
        model: the name that answers carry.
        max_context: tokens of prompt and completion together that the engine takes.
        default_sampling: for sessions that open without one.
        api_key: needed to open sessions, and good for reading and closing any. Without it anybody may open sessions,
            by their bearer token alone if they like, and each is readable with its own key only.
        state_dir: a folder of this server's own, where sessions outlive it; the next server on it has them again.

    Raises:
        TemplateError: the family does not fit the tokenizer, or `auto` cannot prove it.
    """
    service = SessionService(
        engine=engine,
        tokenizer=tokenizer,
        joiner=Joiner(tokenizer, choose_family(family, tokenizer)),
        model=model,
        max_context=max_context,
        sampling=default_sampling or Sampling(),
        api_key=api_key,
        store=SessionStore(idle_timeout_s=idle_timeout_s),
        state=StateDir(state_dir) if state_dir is not None else None,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        with service.state.owned() if service.state else contextlib.nullcontext():
            interrupted = service.restore()
            tasks = [
                asyncio.create_task(service.store.sweep_forever()),
                *(asyncio.create_task(engine.abort(rid)) for rid in interrupted),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await service.store.shut_down()
                await engine.aclose()

    app = Starlette(routes=_routes(service), lifespan=lifespan, exception_handlers={404: _no_route, 405: _no_route})
    app.router.redirect_slashes = False
    app.state.sessions = service.store
    return app


def _routes(service: SessionService) -> list[Route]:
    sessions, turns = SessionRoutes(service=service), TurnRoutes(service=service)
    below = "/sessions/{session_id}"

    def route(path: str, endpoint: Endpoint, *methods: str, dialect: Dialect = CHAT) -> Route:
        return Route(path, _answered(endpoint, service, dialect), methods=methods)

    def ask(path: str, dialect: Dialect) -> Route:
        return route(path, lambda request: turns.ask(request, dialect), "POST", dialect=dialect)

    # In the order in which they are asked for: every request tries the routes one by one.
    routes: list[Route] = []
    for base in (f"{below}/v1", "/v1"):
        routes += [
            ask(f"{base}/chat/completions", CHAT),
            ask(f"{base}/messages", MESSAGES),
            ask(f"{base}/responses", RESPONSES),
            route(
                f"{base}/messages/count_tokens",
                lambda request: turns.count(request, COUNT_TOKENS),
                "POST",
                dialect=MESSAGES,
            ),
            route(f"{base}/models", turns.models, "GET"),
            route(base, turns.head, "HEAD"),
        ]
    return [
        *routes,
        route("/sessions", sessions.open, "POST"),
        route(below, sessions.describe, "GET"),
        route(below, sessions.close, "DELETE"),
        route(f"{below}/trajectories", sessions.trajectories, "GET"),
        route(f"{below}/samples", sessions.samples, "POST"),
        route("/health", sessions.health, "GET"),
        route("/metrics", sessions.metrics, "GET"),
        route("/openapi.json", _openapi, "GET"),
        route("/", turns.head, "HEAD"),
    ]


def _answered(endpoint: Endpoint, service: SessionService, dialect: Dialect) -> Endpoint:
    """`endpoint`, with Miles' errors answered in the shape of the dialect."""

    async def call(request: Request) -> ASGIApp:
        try:
            answer = await endpoint(request)
        except MilesError as error:
            answer = refusal(error, dialect)
        status = str(getattr(answer, "status_code", 200))
        service.metrics.add("requests_total", route=request.scope["route"].path, status=status)
        return answer

    return call


async def _openapi(_: Request) -> Response:
    return json_response(document())


async def _no_route(request: Request, error: Exception) -> Response:
    problem = RequestError(
        f"{request.method} {request.url.path} is not served. Sessions: POST /sessions; agents: POST "
        "/sessions/ID/v1/chat/completions, /responses or /messages.",
        status=getattr(error, "status_code", 404),
        code="not_found",
    )
    return refusal(problem, MESSAGES if request.url.path.endswith("/messages") else CHAT)


def document() -> dict[str, Any]:
    """The routes as an OpenAPI document; bodies are the Structs that read them."""
    structs = [SessionRequest, SamplesRequest, *(cls for _, cls in _ASKS.values())]
    bodies, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schema = dict(zip(structs, bodies, strict=True))
    session = [{"name": "session_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    picker = {"name": "picker", "in": "query", "schema": {"enum": ["default", "leaves", "all"]}}
    below = "/sessions/{session_id}"
    paths: dict[str, Any] = {
        "/health": {"get": _operation("Whether it serves, and how much it holds.", secured=False)},
        "/metrics": {"get": _operation("Counters in Prometheus' text format.", secured=False)},
        "/sessions": {"post": _operation("Open a session.", body=schema[SessionRequest], status="201")},
        below: {
            "parameters": session,
            "get": _operation("The tree of turns, without ids."),
            "delete": _operation("Abort what runs and remove the session.", status="204"),
        },
        f"{below}/trajectories": {
            "parameters": session,
            "get": {**_operation("Trajectories as msgpack records."), "parameters": [picker]},
        },
        f"{below}/samples": {
            "parameters": session,
            "post": _operation("Training samples.", body=schema[SamplesRequest]),
        },
    }
    for base, parameters in ((f"{below}/v1", session), ("/v1", [])):
        paths[f"{base}/models"] = {"parameters": parameters, "get": _operation("The one model.")}
        for path, (summary, cls) in _ASKS.items():
            paths[f"{base}/{path}"] = {"parameters": parameters, "post": _operation(summary, body=schema[cls])}
    return {
        "openapi": "3.1.0",
        "info": {"title": "miles-tito", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str, *, body: dict[str, Any] | None = None, status: str = "200", secured: bool = True
) -> dict[str, Any]:
    answers = {code: {"description": text} for code, text in {status: "Done.", **_ANSWERS}.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return {**operation, "security": [{"key": []}]} if secured else operation
