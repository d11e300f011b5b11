"""Sessions at work: turns that run, who waits for them, and when a session ends."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Generator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext

import numpy as np

from miles_tito.engine.generation import Engine, join, run_turn
from miles_tito.errors import RequestError
from miles_tito.sessions.journal import Journal
from miles_tito.sessions.session import Plan, Session, Turn
from miles_tito.sessions.tree import Node
from miles_tito.sessions.turn_kinds import Hints
from miles_tito.tokens.families.parser import Piece, pieces_of

from .dialects.base import TurnRequest
from .metrics import Metrics

_QUIET_S = 15.0
"""Silence of the engine after which a stream says that it is still there, as in a pause for new weights."""
_THREAD_FROM_CHARS = 20_000
"""Text from which encoding moves to a thread, so that it does not hold up other sessions."""


class RecordedTurn:
    """An answer that was recorded and never reached its client, as when the server died in between.

    `TurnAnswer` sends it like that of a `RunningTurn`, whose methods say more.
    """

    cached_tokens = 0
    has_failed = False

    def __init__(self, node: Node) -> None:
        self.node = node

    def attached(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        yield pieces_of(self.node.message)

    async def begun(self) -> None:
        return

    async def result(self) -> Node:
        return self.node


class RunningTurn:
    """One model call at the engine and everybody who waits for it; it ends when the last one leaves.

    `LiveSession.start` makes it.
    """

    def __init__(
        self,
        session: Session,
        turn: Turn,
        engine: Engine,
        *,
        stream: bool,
        journal: Journal | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.turn = turn
        self.node = turn.node
        self.cached_tokens = 0
        self._journal = journal
        self._metrics = metrics
        self._session = session
        self._engine = engine
        self._stream = stream
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._waiting = 0
        self._closed_because: str | None = None
        self._task = asyncio.create_task(self._run(), name=f"turn {turn.request.rid}")
        self._task.add_done_callback(self._ended)
        if journal:
            journal.begun(self.node)

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
        """What was sampled, as it comes, from the beginning; nothing now and then while nothing comes."""
        seen = 0
        while True:
            news, done = self._news, self._task.done()  # before the yield, during which both may change
            if seen < len(self._pieces):
                fresh, seen = self._pieces[seen:], len(self._pieces)
                yield fresh
            if done:
                return
            try:
                async with asyncio.timeout(_QUIET_S):
                    await news.wait()
            except TimeoutError:
                yield []

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a record."""
        return self._task.done() and not self.node.is_done

    async def begun(self) -> None:
        """Return as soon as there is a first piece, an end or an error."""
        while not self._pieces and not self._task.done():
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
        """Abort the turn; those who wait for it get `why` as an error."""
        self._closed_because = why
        self._task.cancel()
        await asyncio.wait({self._task})

    @property
    def is_done(self) -> bool:
        return self._task.done()

    @property
    def is_attached(self) -> bool:
        return self._waiting > 0

    async def _run(self) -> Node:
        turn, began = self.turn, time.perf_counter()
        async with aclosing(run_turn(self._engine, turn.request, stream=self._stream)) as generations:
            async for generation in generations:
                turn.pieces.append(generation)
                self._publish(turn.reader.feed(generation.output_ids))
        whole = join(turn.pieces)
        self.cached_tokens = whole.cached_tokens
        self._publish(turn.reader.finish())
        node = self._session.commit(turn, whole)
        if self._journal:
            self._journal.recorded(node)
        if self._metrics:
            self._count(self._metrics, node, time.perf_counter() - began)
        return node

    def _count(self, metrics: Metrics, node: Node, seconds: float) -> None:
        metrics.add("turns_total", kind=str(node.kind), finish_reason=str(node.finish_reason))
        metrics.add("prompt_tokens_total", node.num_ids - len(node.completion_ids))
        metrics.add("cached_tokens_total", self.cached_tokens)
        metrics.add("completion_tokens_total", len(node.completion_ids))
        metrics.time("engine_seconds", seconds)

    def _ended(self, task: asyncio.Task[Node]) -> None:
        """Runs before anybody who waits for the task goes on."""
        if task.cancelled() or task.exception():
            self._session.discard(self.turn)
            if self._journal:
                self._journal.given_up(self.node)
        self._wake()

    def _publish(self, pieces: list[Piece]) -> None:
        self._pieces += pieces
        if pieces:
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class LiveSession:
    """An open session: its key, deadline and running turns. `SessionService` opens it, the routes of agents use it."""

    def __init__(
        self,
        session: Session,
        *,
        key_digest: bytes,
        deadline_at: float | None = None,
        idle_timeout_s: float | None = None,
        journal: Journal | None = None,
    ) -> None:
        """
        Args:
            key_digest: `digest_key` of the client's key.
            deadline_at: seconds since the epoch.
            idle_timeout_s: removed when unused for so long; the server's own limit where it is None.
            journal: written along, so that the session outlives its server.
        """
        self.session = session
        self.deadline = None if deadline_at is None else time.monotonic() + deadline_at - time.time()
        self.last_used = time.monotonic()
        self.closed_because: str | None = None
        self.idle_timeout_s = idle_timeout_s
        self.journal = journal
        self.key_digest = key_digest
        self._running: dict[bytes, RunningTurn] = {}

    @property
    def is_due(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    async def start(
        self, asked: TurnRequest, engine: Engine, *, hints: Hints | None = None, metrics: Metrics | None = None
    ) -> RecordedTurn | RunningTurn:
        """Start the turn that `asked` asks for, or join the one that it repeats.

        Equal requests at one time are separate replies, each a branch; a client that marks a request as a retry
        waits for the running one instead. A recorded reply that no client got answers the request that repeats it.

        Raises:
            RequestError: the request cannot be served; nothing changed.
        """
        self._check_open()
        session = self.session
        hints = hints or Hints()
        plan = session.plan(asked.messages, tools=asked.tools, variables=asked.variables, hints=hints)
        running = self._running.get(plan.match.path)
        if hints.is_retry and running and not running.is_done:
            return running
        lost = session.undelivered(plan, asked.form)
        if lost and not any(other.node is lost for other in self._running.values() if other.is_attached):
            return RecordedTurn(lost)
        ids = await encode(session, plan)
        self._check_open()  # it may have ended while a thread was at work
        turn = session.begin(
            plan,
            ids,
            rid=f"{session.id}-{secrets.token_hex(8)}",
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            form=asked.form,
        )
        self._running = {k: v for k, v in self._running.items() if not v.is_done or v.is_attached}
        key = plan.match.path if plan.match.path not in self._running else turn.request.rid.encode()
        self._running[key] = RunningTurn(
            session, turn, engine, stream=asked.stream, journal=self.journal, metrics=metrics
        )
        return self._running[key]

    def _check_open(self) -> None:
        if self.closed_because is not None or self.is_due:
            why = self.closed_because or "The deadline of this session has passed."
            raise RequestError(why, status=410, code="session_closed")

    @property
    def running(self) -> list[RunningTurn]:
        """Turns at the engine."""
        return [turn for turn in self._running.values() if not turn.is_done]

    def delivered(self, node: Node) -> None:
        """The client got the whole reply."""
        if not node.is_delivered:
            node.is_delivered = True
            if self.journal:
                self.journal.delivered(node)

    async def close(self, why: str) -> None:
        """Give up all running turns; what was recorded stays readable as long as the session is held."""
        self.closed_because = why
        for running in list(self._running.values()):
            await running.close(why)


def digest_key(key: str) -> bytes:
    """What is kept of a session's key; the key is random, so a plain digest does not give it away."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


async def encode(session: Session, plan: Plan) -> np.ndarray:
    """`session.encode`, in a thread where it takes long."""
    return await asyncio.to_thread(session.encode, plan) if _is_long(plan) else session.encode(plan)


def _is_long(plan: Plan) -> bool:
    new = plan.messages[plan.match.num_messages :]
    return sum(len(message["content"]) for message in new) >= _THREAD_FROM_CHARS
