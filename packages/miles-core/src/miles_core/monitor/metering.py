"""How busy the engines are, seen from where the requests leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from miles_tito.engine.generation import Engine, GenerateRequest, Generation
from miles_tito.errors import EngineError, RequestSwallowed

SHORT_GAP_S = 0.05
"""Pauses up to this are drawn as part of one span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What one session server sent through its engines so far; the run reads it after each step."""

    busy_s: float = 0.0
    """Seconds since the start with at least one request under way."""
    sampled_tokens: int = 0
    """Since the start."""
    spans: tuple[tuple[float, float], ...] = ()
    """Busy spans that ended since the last reading, seconds since the epoch."""
    resent: int = 0
    """Requests sent again after a broken connection or a dead engine, since the start."""
    swallowed: int = 0
    """Requests that an engine accepted and lost, since the start."""

    def after(self, earlier: Counters) -> Counters:
        """Counted on from what a server counted that this one took the place of."""
        return Counters(
            busy_s=self.busy_s + earlier.busy_s,
            sampled_tokens=self.sampled_tokens + earlier.sampled_tokens,
            spans=self.spans,
            resent=self.resent + earlier.resent,
            swallowed=self.swallowed + earlier.swallowed,
        )


class BusyMeter:
    """Seconds in which at least one request was under way; `MeteredEngine` enters it with each request."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._total = 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = self._clock()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self._close(self._clock())

    def read(self) -> tuple[float, tuple[tuple[float, float], ...]]:
        """Busy seconds so far, and the spans since the last reading; a request still under way is cut in two."""
        if self._running:
            now = self._clock()
            self._close(now)
            self._since = now
        spans, self._spans = tuple(self._spans), []
        return self._total, spans

    def _close(self, end: float) -> None:
        self._total += end - self._since
        if self._spans and self._since - self._spans[-1][1] < SHORT_GAP_S:
            self._spans[-1] = (self._spans[-1][0], end)
        else:
            self._spans.append((self._since, end))


class MeteredEngine:
    """The engine that a session server sends to: counts requests and tokens, and delays requests while none serves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._busy = BusyMeter()
        self._sampled_tokens = 0
        self._resent = self._swallowed = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def pause(self, is_paused: bool) -> None:
        """Let new requests wait, or send them."""
        self._opened.clear() if is_paused else self._opened.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        await self._opened.wait()
        with self._busy, self._counted():
            generation = await self._engine.generate(request)
        self._sampled_tokens += len(generation.output_ids)
        return generation

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        await self._opened.wait()
        with self._busy, self._counted():
            async with aclosing(self._engine.stream(request)) as pieces:
                async for piece in pieces:
                    self._sampled_tokens += len(piece.output_ids)
                    yield piece

    async def abort(self, rid: str) -> None:
        await self._engine.abort(rid)

    async def aclose(self) -> None:
        await self._engine.aclose()

    def counters(self) -> Counters:
        busy_s, spans = self._busy.read()
        return Counters(
            busy_s=busy_s,
            sampled_tokens=self._sampled_tokens,
            spans=spans,
            resent=self._resent,
            swallowed=self._swallowed,
        )

    @contextmanager
    def _counted(self) -> Generator[None]:
        try:
            yield
        except EngineError as error:
            self._resent += error.retryable
            self._swallowed += isinstance(error, RequestSwallowed)
            raise
