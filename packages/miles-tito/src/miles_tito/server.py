"""The session server: agents talk OpenAI chat to it, it talks token ids to an engine and records them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from .dialects.chat import ChatAnswer, ChatRequest, Usage, error_body, read_request
from .errors import EngineError, MilesError, MissingDependency, RecordError, RequestError, SampleError
from .export import to_samples
from .families import Family, choose_family
from .generation import Engine
from .hints import read_hints
from .journal import Opened, StateDir
from .live import Answer, LiveSession, as_request_error, digest_key
from .merge import Joiner
from .messages import value_key
from .pick import picker_named
from .records import Episode, Outcome, Sample, Sampling, Trajectory, check_reward
from .session import Session
from .store import SessionStore
from .tokenizer import Tokenizer
from .tree import Node
from .wire import encode_many, encode_samples, samples_to_safetensors

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise MissingDependency("pip install 'miles-tito[server]'") from error

MSGPACK = "application/msgpack"
SAFETENSORS = "application/x-safetensors"
JSON = "application/json"

T = TypeVar("T")

_log = logging.getLogger(__name__)


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
            and each is readable with its own key only.
        state_dir: a folder of this server's own, where sessions outlive it; the next server on it has them again.

    Raises:
        TemplateError: the family does not fit the tokenizer, or `auto` cannot prove it.
    """
    joiner = Joiner(tokenizer, choose_family(family, tokenizer))
    server = _Server(
        engine=engine,
        joiner=joiner,
        model=model,
        max_context=max_context,
        sampling=default_sampling or Sampling(),
        api_key=api_key,
        store=SessionStore(idle_timeout_s=idle_timeout_s),
        state=StateDir(state_dir) if state_dir is not None else None,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        with server.state.owned() if server.state else contextlib.nullcontext():
            interrupted = server.restore()
            tasks = [
                asyncio.create_task(server.store.sweep_forever()),
                *(asyncio.create_task(engine.abort(rid)) for rid in interrupted),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await server.store.shut_down()
                await engine.aclose()

    session = "/sessions/{session_id}"
    routes = [
        Route("/health", server.health, methods=["GET"]),
        Route("/sessions", _answered(server.open), methods=["POST"]),
        Route(session, _answered(server.describe), methods=["GET"]),
        Route(session, _answered(server.close), methods=["DELETE"]),
        Route(f"{session}/trajectories", _answered(server.trajectories), methods=["GET"]),
        Route(f"{session}/samples", _answered(server.samples), methods=["POST"]),
        Route(f"{session}/v1/models", _answered(server.models), methods=["GET"]),
        Route(f"{session}/v1/chat/completions", _answered(server.chat), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _no_route, 405: _no_route})


async def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[str], None] | None = None,
    signals: bool = False,
) -> None:
    """Serve `app` until cancelled (or, with `signals`, until Ctrl-C or SIGTERM).

    Args:
        port: 0 takes a free one.
        ready: called with the URL as soon as requests are answered.
        signals: take over the process's signal handlers; leave that to the process's owner otherwise.
    """
    sock = _listen(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=300,  # a client between two turns waits for a tool; a closed connection would surprise it
        timeout_graceful_shutdown=2,
    )
    server = _Uvicorn(config, ready=lambda: ready(url) if ready else None, signals=signals)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await task
        raise
    finally:
        sock.close()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # asyncio sets TCP_NODELAY only where the protocol is named; without it, each answer takes 40 ms more.
    sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it is up and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], signals: bool) -> None:
        super().__init__(config)
        self._ready = ready
        self._signals = signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield


@dataclass(frozen=True, kw_only=True)
class _Server:
    """The routes."""

    engine: Engine
    joiner: Joiner
    model: str
    max_context: int
    sampling: Sampling
    api_key: str | None
    store: SessionStore
    state: StateDir | None

    def restore(self) -> list[str]:
        """Take over the sessions that an earlier server left; the ids of the calls that it had at the engine."""
        interrupted: list[str] = []
        for saved in self.state.read(self.fingerprint) if self.state else ():
            opened = saved.opened
            session = Session(
                opened.session_id,
                self.joiner,
                max_context=self.max_context,
                sampling=opened.sampling,
                metadata=opened.metadata,
                now=datetime.fromisoformat(opened.opened_at),
            )
            session.restore(
                saved.nodes,
                next_id=saved.next_id,
                next_branch=saved.next_branch,
                discarded=saved.num_given_up + len(saved.interrupted),
            )
            if saved.interrupted:
                _log.warning(
                    "Session %s: %d turns were under way when the last server ended; their clients must ask again.",
                    session.id,
                    len(saved.interrupted),
                )
            interrupted += saved.interrupted
            self.store.add(
                LiveSession(
                    session, key_digest=opened.key_digest, deadline_at=opened.deadline_at, journal=saved.journal
                )
            )
        if len(self.store):
            _log.info("Restored %d sessions with %d turns.", len(self.store), self.store.num_turns)
        return interrupted

    @cached_property
    def fingerprint(self) -> bytes:
        """Of what the recorded ids depend on."""
        tokenizer = self.joiner.tokenizer
        template = tokenizer.template.source if tokenizer.template else ""
        return value_key([self.joiner.family.name, tokenizer.vocab_size, list(tokenizer.eos_ids), template])

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok", "sessions": len(self.store), "turns": self.store.num_turns})

    async def open(self, request: Request) -> Response:
        if self.api_key is not None and not self._is_operator(request):
            raise RequestError(
                "Opening a session needs the server's API key as a bearer token.", status=401, code="invalid_api_key"
            )
        opening = _read(await request.body(), _Opening)
        session = Session(
            opening.session_id,
            self.joiner,
            max_context=self.max_context,
            sampling=opening.sampling or self.sampling,
            metadata=opening.metadata,
        )
        self.store.check_free(session.id)
        api_key = secrets.token_urlsafe(24)
        deadline_at = None if opening.deadline_s is None else time.time() + opening.deadline_s
        opened = Opened(
            session_id=session.id,
            key_digest=digest_key(api_key),
            fingerprint=self.fingerprint,
            opened_at=session.now.isoformat(),
            deadline_at=deadline_at,
            sampling=session.sampling,
            metadata=session.metadata,
        )
        journal = self.state.create(opened) if self.state else None
        self.store.add(LiveSession(session, key_digest=opened.key_digest, deadline_at=deadline_at, journal=journal))
        return _json(
            {
                "session_id": session.id,
                "api_key": api_key,
                "base_url": f"{request.base_url}sessions/{session.id}/v1",
                "model": self.model,
                "sampling": session.sampling,
            },
            status=201,
        )

    async def describe(self, request: Request) -> Response:
        return _json(self._session(request).session.describe())

    async def close(self, request: Request) -> Response:
        session_id = self._session(request).session.id
        await self.store.remove(session_id)
        return Response(status_code=204)

    async def trajectories(self, request: Request) -> Response:
        session = self._session(request).session
        picked = session.pick(picker_named(request.query_params.get("picker", "default")))

        def build() -> bytes:
            return encode_many(session.assemble(picked), Trajectory)

        return Response(await asyncio.to_thread(build), media_type=MSGPACK)

    async def samples(self, request: Request) -> Response:
        session = self._session(request).session
        grade = _read(await request.body() or b"{}", _Grade)
        picked = session.pick(picker_named(grade.picker), max_tokens=grade.max_tokens)
        accept = request.headers.get("accept", "")

        def build() -> Response:
            samples = _samples(session, session.assemble(picked), grade)
            if SAFETENSORS in accept:
                headers = {"x-miles-num-dropped": str(len(picked.dropped))}
                return Response(samples_to_safetensors(samples), media_type=SAFETENSORS, headers=headers)
            if MSGPACK in accept:
                return Response(encode_samples(samples, picked.dropped), media_type=MSGPACK)
            return _json({"samples": samples, "dropped": picked.dropped})

        return await asyncio.to_thread(build)

    async def models(self, request: Request) -> Response:
        self._session(request, operator=False)
        return _json({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "miles"}]})

    async def chat(self, request: Request) -> ASGIApp:
        live = self._session(request, operator=False)
        chat = read_request(await request.body(), sampling=live.session.sampling, model=self.model)
        running = await live.start(chat, self.engine, hints=read_hints(request.headers))
        answer = ChatAnswer(rid=running.node.rid, model=self.model, include_usage=chat.include_usage)
        headers = _turn_headers(live, running, chat)
        kind = _EventStream if chat.stream else _Whole
        return kind(live, running, answer, headers)

    def _session(self, request: Request, *, operator: bool = True) -> LiveSession:
        """The session in the path, for its own key, or (where `operator`) for the server's."""
        token = _token(request)
        session_id = request.path_params["session_id"]
        if operator and self._is_operator(request):
            return self.store.get(session_id)
        try:
            live = self.store.get(session_id)
        except RequestError:
            live = None
        if live is None or not live.accepts(token):
            # One answer for both: whoever lacks the key does not learn which sessions exist.
            raise RequestError(
                f"No session {session_id!r} for this bearer token: it was closed, has expired, or the token is another "
                "session's.",
                status=401,
                code="invalid_api_key",
            )
        return live

    def _is_operator(self, request: Request) -> bool:
        return self.api_key is not None and hmac.compare_digest(self.api_key.encode(), _token(request).encode())


class _Whole:
    """An answer in one body; the turn is given up when the client leaves."""

    def __init__(self, live: LiveSession, running: Answer, answer: ChatAnswer, headers: dict[str, str]) -> None:
        self._live = live
        self._running = running
        self._answer = answer
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._running.attached():
            try:
                node = await _unless_disconnected(receive, self._running.result())
            except MilesError as error:
                await _error_response(error)(scope, receive, send)
                return
            if node is None:
                return  # nobody is there to read it
            assert node.finish_reason is not None
            body = self._answer.whole(node.message, node.finish_reason, _usage(self._running, node))
            await Response(body, media_type=JSON, headers=self._headers)(scope, receive, send)
            self._live.delivered(node)


class _EventStream:
    """An answer in server-sent events; the turn is given up when the client leaves."""

    def __init__(self, live: LiveSession, running: Answer, answer: ChatAnswer, headers: dict[str, str]) -> None:
        self._live = live
        self._running = running
        self._answer = answer
        self._headers = {**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(key.encode(), value.encode()) for key, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._running.attached():
            await _unless_disconnected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await write(self._answer.opening())
        async for pieces in self._running.pieces():
            await write(self._answer.pieces(pieces))
        try:
            node = await self._running.result()
        except MilesError as error:
            problem = _as_request_error(error)
            await write(
                self._answer.failure(error_body(str(problem), status=problem.status, code=problem.code)), more=False
            )
            return
        assert node.finish_reason is not None
        await write(self._answer.closing(node.finish_reason, _usage(self._running, node)), more=False)
        self._live.delivered(node)


class _Opening(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /sessions`."""

    session_id: str
    sampling: Sampling | None = None
    metadata: dict[str, Any] = {}
    deadline_s: float | None = None


class _Grade(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /sessions/{id}/samples`."""

    reward: float | None = None
    outcome: Outcome | None = None
    advantage: float | None = None
    """The reward where it is left out, 0 where there is no reward yet either."""
    prompt_id: str | None = None
    group_id: str | None = None
    picker: str = "default"
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Longer trajectories are dropped."""
    metadata: dict[str, Any] = {}


def _samples(session: Session, trajectories: tuple[Trajectory, ...], grade: _Grade) -> list[Sample]:
    if grade.outcome is not None:
        # Says no to a reward with an outcome that carries none, and the other way round.
        error = None if grade.outcome.has_reward else f"the client reported {grade.outcome}"
        check_reward(grade.outcome, grade.reward, error)
        if not grade.outcome.has_reward:
            raise SampleError(
                f"Outcome {grade.outcome} carries no reward, so session {session.id} is no training data."
            )
    episode = Episode(
        id=session.id,
        prompt_id=grade.prompt_id or session.id,
        group_id=grade.group_id or session.id,
        outcome=grade.outcome or Outcome.GRADED,
        reward=0.0 if grade.reward is None else grade.reward,
        trajectories=trajectories,
    )
    advantage = grade.advantage if grade.advantage is not None else grade.reward or 0.0
    return [
        replace(sample, reward=grade.reward, metadata={**sample.metadata, **grade.metadata})
        for sample in to_samples(episode, advantage)
    ]


def _read(body: bytes, cls: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=cls)
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not as it should be: {error}", code="invalid_body") from error


def _answered(route: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[ASGIApp]]:
    """`route`, with Miles' errors answered in OpenAI's shape."""

    async def call(request: Request) -> ASGIApp:
        try:
            return await route(request)
        except MilesError as error:
            return _error_response(error)

    return call


def _error_response(error: MilesError) -> Response:
    problem = _as_request_error(error)
    body = error_body(str(problem), status=problem.status, code=problem.code, param=problem.param)
    return Response(body, status_code=problem.status, media_type=JSON)


def _as_request_error(error: MilesError) -> RequestError:
    match error:
        case RequestError():
            return error
        case EngineError():
            return as_request_error(error)
        case SampleError() | RecordError():
            return RequestError(str(error), status=422, code="invalid_record")
        case _:
            return RequestError(str(error), status=500, code="internal_error")


async def _no_route(request: Request, error: Exception) -> Response:
    path = f"{request.method} {request.url.path}"
    text = f"{path} is not served. Sessions: POST /sessions; chat: POST /sessions/ID/v1/chat/completions."
    status = getattr(error, "status_code", 404)
    return Response(error_body(text, status=status, code="not_found"), status_code=status, media_type=JSON)


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
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


def _turn_headers(live: LiveSession, running: Answer, chat: ChatRequest) -> dict[str, str]:
    node = running.node
    headers = {
        "x-miles-turn": str(node.id),
        "x-miles-trajectory": f"{live.session.id}:{node.branch}",
        "x-miles-kind": str(node.kind),
    }
    return {**headers, "x-miles-pinned": ",".join(chat.pinned)} if chat.pinned else headers


def _usage(running: Answer, node: Node) -> Usage:
    return Usage(
        prompt_tokens=node.num_ids - len(node.completion_ids),
        completion_tokens=len(node.completion_ids),
        cached_tokens=running.cached_tokens,
    )


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _json(value: Any, *, status: int = 200) -> Response:
    def plain(item: Any) -> Any:
        return item.tolist()

    return Response(msgspec.json.encode(value, enc_hook=plain), status_code=status, media_type=JSON)
