"""How much of the wall time engines and trainer worked, and how fast samples came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from miles_tito.engine.generation import Engine, GenerateRequest, Generation
from miles_tito.errors import EngineError, RequestSwallowed

from .base import Monitor

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


class RunUsage:
    """Differences of the session servers' counters over a step and over the whole loop; the loop calls it each step.

    With several session servers the engines count as busy as the busiest of them says: a lower bound.
    """

    def __init__(
        self, counters: Sequence[Counters], *, monitor: Monitor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._monitor = monitor
        self._clock = clock
        self._start = self._last = clock()
        self._first_busy = self._busy = _busy_s(counters)
        self._tokens = _tokens(counters)
        self._train_seconds = 0.0
        self._episodes = 0

    def step(self, counters: Sequence[Counters], *, train_seconds: float, episodes: int) -> dict[str, float]:
        """Metrics since the last call; busy spans go to the monitor's trace."""
        for lane, one in enumerate(counters):
            for start, end in one.spans:
                self._monitor.event("generate", start, end, "engine" if lane == 0 else f"engine {lane}")
        now, busy, tokens = self._clock(), _busy_s(counters), _tokens(counters)
        elapsed = max(now - self._last, 1e-9)
        metrics = {
            "engine/tokens_per_s": (tokens - self._tokens) / elapsed,
            "engine/utilisation": min((busy - self._busy) / elapsed, 1.0),
            "trainer/utilisation": min(train_seconds / elapsed, 1.0),
            "engine/resent": float(sum(one.resent for one in counters)),
            "engine/swallowed": float(sum(one.swallowed for one in counters)),
        }
        self._last, self._busy, self._tokens = now, busy, tokens
        self._train_seconds += train_seconds
        self._episodes += episodes
        return metrics

    @property
    def seconds(self) -> float:
        """Of the loop up to its last step."""
        return self._last - self._start

    def totals(self) -> dict[str, float]:
        """`samples_per_s`, `engine_utilisation`, `trainer_utilisation` up to the last step."""
        seconds = max(self.seconds, 1e-9)
        return {
            "samples_per_s": self._episodes / seconds,
            "engine_utilisation": min((self._busy - self._first_busy) / seconds, 1.0),
            "trainer_utilisation": min(self._train_seconds / seconds, 1.0),
        }


class Span(NamedTuple):
    """Something took from `start` to `end` (seconds since the epoch) in `lane`, as a monitor's `event` gets it."""

    name: str
    start: float
    end: float
    lane: str


def utilisation(
    spans: Iterable[Span], lanes: Mapping[str, Sequence[str]], *, start: float, end: float
) -> dict[str, float]:
    """Share of the window, 0 to 1, in which each group of `lanes` was busy, averaged over its lanes.

    Args:
        lanes: group -> its lanes, e.g. `{"engine": ["engine", "engine 1"], "trainer": ["trainer"]}`. A lane without
            spans was idle and counts as 0.
        start, end: the window, seconds since the epoch.
    """
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    return {
        group: sum(busy_fraction(by_lane.get(lane, ()), start=start, end=end) for lane in names) / max(len(names), 1)
        for group, names in lanes.items()
    }


def busy_fraction(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Share of the window in which at least one span was open; 0 for an empty window."""
    return busy_seconds(spans, start=start, end=end) / (end - start) if end > start else 0.0


def busy_seconds(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Length of the union of `spans` within the window: overlapping spans count once."""
    busy, reached = 0.0, start
    for left, right in sorted((max(s.start, start), min(s.end, end)) for s in spans):
        busy += max(right - max(left, reached), 0.0)
        reached = max(reached, right)
    return busy


def _busy_s(counters: Sequence[Counters]) -> float:
    return max(one.busy_s for one in counters)


def _tokens(counters: Sequence[Counters]) -> int:
    return sum(one.sampled_tokens for one in counters)
