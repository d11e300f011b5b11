"""Finds requests that an engine accepted and lost.

Nothing is ever heard of such a request again, so its episode would hang until its deadline. The engines say how many
requests they know of. When that is fewer than are waited for, again and again, the ones waited for longest are aborted:
an engine that has the request answers at once with its tokens, and the turn goes on behind them; a request without an
answer was swallowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from miles_tito.errors import RequestSwallowed

from .generation import Engine, GenerateRequest, Generation

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECKS = 3
"""Countings in a row with too few requests, before any is probed: a request on its way is in no count."""
MAX_PROBES = 8
"""Requests probed at once; each costs the one that is alive a new prefill."""


@runtime_checkable
class CountingEngine(Engine, Protocol):
    """An engine that says how many requests it knows of, as `SGLangEngine` does."""

    async def num_known(self) -> int | None:
        """Requests that run or wait; None while that says nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCounts:
    """How often a silent request was probed, and how often it was lost, since the start."""

    probed: int
    swallowed: int


class WatchedEngine:
    """An engine whose lost requests raise `RequestSwallowed` within seconds instead of hanging.

    Session servers put one around each `SGLangEngine`.
    """

    def __init__(
        self,
        engine: CountingEngine,
        *,
        interval_s: float = 2.0,
        patience_s: float = 10.0,
        answer_s: float = 5.0,
        probe_anyway_s: float = 300.0,
    ) -> None:
        """
        Args:
            interval_s: between two countings, while anything is waited for.
            patience_s: silence before a request may be suspected.
            answer_s: how long the answer to a probe may take.
            probe_anyway_s: silence after which a request is probed whatever the counts say: other users of the engines
                can hide that one is missing.
        """
        self._engine = engine
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._probe_anyway_s = probe_anyway_s
        self._calls: set[_Call] = set()
        self._watching: asyncio.Task[None] | None = None
        self._cleared: dict[str, float] = {}
        """When a request that is still waited for last answered a probe."""
        self._probed = self._swallowed = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        call = self._begin(request)
        try:
            return await call.unless_lost(self._engine.generate(request))
        finally:
            self._calls.discard(call)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        call = self._begin(request)
        try:
            async with aclosing(self._engine.stream(request)) as pieces:
                while (piece := await call.unless_lost(anext(pieces, None))) is not None:
                    call.heard()
                    yield piece
        finally:
            self._calls.discard(call)

    async def abort(self, rid: str) -> None:
        await self._engine.abort(rid)

    async def aclose(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._engine.aclose()

    def counts(self) -> WatchCounts:
        return WatchCounts(probed=self._probed, swallowed=self._swallowed)

    @property
    def num_waiting(self) -> int:
        """Requests without an answer."""
        return len(self._calls)

    def _begin(self, request: GenerateRequest) -> _Call:
        call = _Call(request)
        self._calls.add(call)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name=f"watch the requests to {self._engine}")
        return call

    async def _watch(self) -> None:
        """Count until nothing is waited for."""
        too_few = 0
        settled = _now()
        while self._calls:
            await asyncio.sleep(self._interval_s)
            known = await self._engine.num_known()
            if known is None:
                too_few, settled = 0, _now()
                continue
            too_few = too_few + 1 if known < len(self._calls) else 0
            silent = [call for call in self._calls if _now() - max(call.last_heard, settled) >= self._patience_s]
            if too_few >= CHECKS:
                since = _now() - self._probe_anyway_s / 5
                suspects = [call for call in silent if self._cleared.get(call.request.rid, -math.inf) <= since]
            else:
                suspects = [call for call in silent if _now() - call.last_heard >= self._probe_anyway_s]
            if suspects:
                suspects.sort(key=lambda call: call.last_heard)
                await asyncio.gather(*(self._probe(call) for call in suspects[:MAX_PROBES]))
                too_few = 0
        self._cleared.clear()

    async def _probe(self, call: _Call) -> None:
        """Abort one request; what does not answer to that was swallowed."""
        request = call.request
        self._probed += 1
        call.has_answered.clear()
        await self._engine.abort(request.rid)
        if await call.answers_within(self._answer_s):
            self._cleared[request.rid] = _now()
            return
        self._swallowed += 1
        error = RequestSwallowed(
            f"Request {request.rid} ({len(request.input_ids)} tokens in) was accepted {_now() - call.began:.0f} s ago "
            "and no engine knows of it.",
            retryable=True,
        )
        logger.warning("%s", error)
        call.lose(error)


class _Call:
    """One request without an answer yet."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.began = self.last_heard = _now()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_answered = asyncio.Event()

    def heard(self) -> None:
        self.last_heard = _now()
        self.has_answered.set()

    def lose(self, error: RequestSwallowed) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # it may have ended just now, and then nobody asks

    async def unless_lost(self, answer: Awaitable[T]) -> T:
        """The answer; raises RequestSwallowed where it is known that none will come."""
        task = asyncio.ensure_future(answer)
        try:
            await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._lost.result()
            return await task
        finally:
            if task.done():
                self.has_answered.set()
            else:
                task.cancel()
                await asyncio.wait([task])

    async def answers_within(self, seconds: float) -> bool:
        """Whether anything is heard of it in time, since `has_answered` was cleared."""
        try:
            async with asyncio.timeout(seconds):
                await self.has_answered.wait()
        except TimeoutError:
            return False
        return True


def _now() -> float:
    return asyncio.get_running_loop().time()
