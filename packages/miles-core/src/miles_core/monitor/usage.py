"""How much of the wall time engines and trainer worked, and how fast samples came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .base import Monitor
from .metering import Counters


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
