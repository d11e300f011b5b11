"""Sessions at work: turns that run, who waits for them, and when a session ends."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Generator
from contextlib import aclosing, contextmanager

from .dialects.chat import ChatRequest
from .errors import EngineError, RequestError
from .families.parser import Piece
from .generation import Engine, join, run_turn
from .session import Plan, Session, Turn
from .tree import Node

_THREAD_FROM_CHARS = 20_000
"""Text from which encoding moves to a thread, so that it does not hold up other sessions."""


class RunningTurn:
    """One generation and everybody who waits for it; it ends when the last one leaves."""

    def __init__(self, session: Session, turn: Turn, engine: Engine, *, stream: bool) -> None:
        self.turn = turn
        self.cached_tokens = 0
        self._session = session
        self._engine = engine
        self._stream = stream
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._waiting = 0
        self._closed_because: str | None = None
        self._task = asyncio.create_task(self._run(), name=f"turn {turn.request.rid}")
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # waiters may have left

    @contextmanager
    def attached(self) -> Generator[None, None, None]:
        """Wait for this turn; it is given up when nobody does any more."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What was sampled, as it comes, from the beginning."""
        seen = 0
        while True:
            done = self._task.done()
            if seen < len(self._pieces):
                fresh, seen = self._pieces[seen:], len(self._pieces)
                yield fresh
            if done:
                return
            await self._news.wait()

    async def result(self) -> Node:
        """The recorded turn.

        Raises:
            EngineError: the engine failed.
            RequestError: the session was closed.
        """
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._closed_because is None or not self._task.cancelled():
                raise
            raise RequestError(self._closed_because, status=410, code="session_closed") from None

    async def close(self, why: str) -> None:
        """Give the turn up and tell those who wait."""
        self._closed_because = why
        self._task.cancel()
        await asyncio.wait({self._task})

    @property
    def is_done(self) -> bool:
        return self._task.done()

    async def _run(self) -> Node:
        turn = self.turn
        try:
            async with aclosing(run_turn(self._engine, turn.request, stream=self._stream)) as generations:
                async for generation in generations:
                    turn.pieces.append(generation)
                    self._publish(turn.reader.feed(generation.output_ids))
            whole = join(turn.pieces)
            self.cached_tokens = whole.cached_tokens
            self._publish(turn.reader.finish())
            return self._session.commit(turn, whole)
        except BaseException:
            self._session.discard(turn)
            raise
        finally:
            self._task_ended()

    def _publish(self, pieces: list[Piece]) -> None:
        self._pieces += pieces
        if pieces:
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _task_ended(self) -> None:
        # The task is done only after this returns; waiters look again then.
        asyncio.get_running_loop().call_soon(self._wake)


class LiveSession:
    """A session that a client holds a key for."""

    def __init__(self, session: Session, *, deadline_s: float | None) -> None:
        self.session = session
        self.api_key = secrets.token_urlsafe(24)
        self.deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.last_used = time.monotonic()
        self.expired = False
        self._running: dict[bytes, RunningTurn] = {}

    def accepts(self, token: str) -> bool:
        return hmac.compare_digest(self.api_key.encode(), token.encode())

    @property
    def is_busy(self) -> bool:
        return any(not turn.is_done for turn in self._running.values())

    async def start(self, chat: ChatRequest, engine: Engine, *, is_retry: bool) -> RunningTurn:
        """Start the turn that `chat` asks for, or join the one that it repeats.

        Equal requests at one time are separate replies, each a branch; a client that marks a request as a retry
        waits for the running one instead.

        Raises:
            RequestError: the request cannot be served; nothing changed.
        """
        if self.expired:
            raise RequestError("The deadline of this session has passed.", status=410, code="session_closed")
        session = self.session
        plan = session.plan(chat.messages, tools=chat.tools, variables=chat.variables)
        running = self._running.get(plan.identity)
        if is_retry and running and not running.is_done:
            return running
        ids = await asyncio.to_thread(session.encode, plan) if _is_long(plan) else session.encode(plan)
        turn = session.begin(
            plan,
            ids,
            rid=f"{session.id}-{secrets.token_hex(8)}",
            max_tokens=chat.max_tokens,
            stop=chat.stop,
            stop_token_ids=chat.stop_token_ids,
        )
        self._running = {key: other for key, other in self._running.items() if not other.is_done}
        key = plan.identity if plan.identity not in self._running else turn.request.rid.encode()
        self._running[key] = RunningTurn(session, turn, engine, stream=chat.stream)
        return self._running[key]

    async def close(self, why: str) -> None:
        """Give up all running turns; what was recorded stays readable as long as the session is held."""
        self.expired = True
        for running in list(self._running.values()):
            await running.close(why)


def as_request_error(error: EngineError) -> RequestError:
    """An engine's failure as the answer to the request behind it."""
    if error.status == 400:
        return RequestError(str(error), code="engine_refused")
    return RequestError(str(error), status=503 if error.retryable else 502, code="engine_error")


def _is_long(plan: Plan) -> bool:
    new = plan.messages[plan.match.num_messages :]
    return sum(len(message["content"]) for message in new) >= _THREAD_FROM_CHARS
