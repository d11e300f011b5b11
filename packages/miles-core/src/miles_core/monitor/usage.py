"""How much of the loop's wall time the engines and the trainer worked, and how fast samples came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from . import Monitor
from .metering import Counters


class Usage:
    """Differences of the session servers' counters, over a step and over the whole loop.

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


def _busy_s(counters: Sequence[Counters]) -> float:
    return max(one.busy_s for one in counters)


def _tokens(counters: Sequence[Counters]) -> int:
    return sum(one.sampled_tokens for one in counters)
