"""Sentences in the log when a run goes wrong in a way that numbers show, with what to do about it.

A rule looks at the last steps and says what is wrong, or nothing. An alarm sounds when its condition begins, and
again only after it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from miles_core.text import format_seconds

from .base import Monitor

logger = logging.getLogger(__name__)

WINDOW = 8
"""Steps that a rule looks at; with fewer it says nothing."""

LARGE_GAP = 0.2
"""Nats a token. FP8 engines beside a BF16 trainer stay below 0.05."""

LEAST_STALL_S = 300.0
"""A step that took less has not stalled."""

Steps = Sequence[Mapping[str, float]]


def queue_empty(steps: Steps) -> str | None:
    """The trainer starves: it waited for groups more than half of every step."""
    shares = [step.get("time/take_wait", 0.0) / max(step["time/step"], 1e-9) for step in steps]
    if min(shares) <= 0.5 or max(step.get("buffer/queued", 1.0) for step in steps) > 0:
        return None
    return (
        f"The queue was empty after each of the last {len(steps)} steps, and the trainer waited "
        f"{statistics.median(shares):.0%} of the time. Generation is the bottleneck: add engines, raise "
        "`rollout.max_concurrent_episodes`, or give the trainer fewer devices."
    )


def queue_full(steps: Steps) -> str | None:
    """The engines starve: every credit was held by a finished group."""
    if any(step.get("buffer/running", 1.0) > 0 or step.get("buffer/queued", 0.0) <= 0 for step in steps):
        return None
    return (
        f"The queue was full after each of the last {len(steps)} steps: no group was running. Training is the "
        "bottleneck: add trainer ranks, or raise `rollout.max_staleness` if the loss corrects for age."
    )


def logprob_gap_rising(steps: Steps) -> str | None:
    """Trainer and engine drift apart on the very same weights."""
    name = "logprob_gap/same_version_mean"
    gaps = [step[name] for step in steps if step.get(name, 0.0) > 0]
    if len(gaps) < len(steps):
        name = "logprob_gap/mean"
        gaps = [step[name] for step in steps if step.get(name, 0.0) > 0]
    half = len(gaps) // 2
    if half < 2:
        return None
    before, now = statistics.median(gaps[:half]), statistics.median(gaps[half:])
    if now < 2 * before or now < 0.01:
        return None
    return (
        f"`{name}` has risen from {before:.2g} to {now:.2g} within {len(steps)} steps: trainer and engines disagree "
        "about the same tokens. Check that pushes are verified (`sync.verify`), that both use the same precision, "
        "and that routed experts are replayed for a mixture-of-experts model."
    )


def logprob_gap_large(steps: Steps) -> str | None:
    """Trainer and engine do not hold the same model at all: no precision explains so much."""
    gaps = [gap for step in steps if (gap := step.get("logprob_gap/same_version_mean")) is not None]
    if len(gaps) < len(steps) // 2 or min(gaps) < LARGE_GAP:
        return None
    return (
        f"Trainer and engines are {statistics.median(gaps):.2g} nats a token apart on the very same weights (median of "
        f"`logprob_gap/same_version_mean` over {len(gaps)} steps), which no precision explains. The engine computes "
        "another model: look for weights that it never loaded, such as a tied head or a dense layer among experts."
    )


def all_alike(steps: Steps) -> str | None:
    """Nearly every group is all wrong or all right: there is nothing to learn from."""
    for name, what, advice in (
        ("reward/groups_all_low", "the lowest reward", "too hard: warm up with SFT or mix in easier prompts"),
        ("reward/groups_all_high", "the highest reward", "solved: mix in harder prompts or end the run"),
    ):
        shares = [share for step in steps if not math.isnan(share := step.get(name, 0.0))]
        if len(shares) > len(steps) // 2 and min(shares) > 0.8:
            return (
                f"In {statistics.median(shares):.0%} of the groups of the last {len(steps)} steps every episode got "
                f"{what} seen so far. The prompts are {advice}."
            )
    return None


RULES = (queue_empty, queue_full, logprob_gap_rising, logprob_gap_large, all_alike)
"""Each alarm is called as its rule is."""


class Alarms(Monitor):
    """A monitor that writes no numbers but says, in the log and to `on_alarm`, when they are alarming."""

    def __init__(self, *, on_alarm: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            on_alarm: gets the alarm's name and its sentence.
        """
        self._on_alarm = on_alarm
        self._clock = clock
        self._steps: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._sounding: set[str] = set()
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._last_step_at = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step_at = self._clock()
        self._sounding.discard("stall")
        if "time/step" not in metrics:
            return  # an evaluation, not a step
        self._seconds.append(metrics["time/step"])
        self._steps.append(dict(metrics))
        if len(self._steps) < WINDOW:
            return
        for rule in RULES:
            self._judge(rule.__name__, rule(self._steps))

    def rewind(self, step: int) -> None:
        self._steps.clear()

    def check_stall(self) -> None:
        """Sound when the present step takes far longer than those before: ten times the median."""
        waited = self._clock() - self._last_step_at
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        text = None
        if self._seconds and waited > max(10 * usual, LEAST_STALL_S):
            text = (
                f"No step has ended for {format_seconds(waited)}; one takes {format_seconds(usual)} as a rule. Look at "
                "`miles ledger` for what runs, and at the logs of engines and workers."
            )
        self._judge("stall", text)

    async def watch(self) -> None:
        """Check for stalls every ten seconds until cancelled."""
        while True:
            await asyncio.sleep(10.0)
            self.check_stall()

    def _judge(self, name: str, text: str | None) -> None:
        if text is None:
            self._sounding.discard(name)
        elif name not in self._sounding:
            self._sounding.add(name)
            logger.warning("%s: %s", name, text)
            self._on_alarm(name, text)
