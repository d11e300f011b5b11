"""What every monitor gets and answers, and the one that feeds all monitors of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from miles_tito.errors import MilesError

from miles_core.text import format_seconds

logger = logging.getLogger(__name__)

TERMINAL_FATES = ("trained", "filtered", "stale", "failed", "aborted")


class StepError(MilesError, ValueError):
    """A step was logged out of order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredRun:
    """The run that a monitor is made for: the one positional argument of every monitor's constructor."""

    path: Path
    """An existing directory, also of a run that goes on; its name is the run's name in trackers."""
    total_steps: int
    """For the progress and the time left."""
    config: Mapping[str, Any]
    """The resolved configuration as plain data."""
    is_resumed: bool = False
    """An earlier start has logged steps already."""

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The result of one run; made when it ends, for the console, `summary.json` and the report."""

    status: Literal["finished", "interrupted", "failed"]
    steps: int
    """Steps committed."""
    seconds: float
    """Wall time of the loop, start-up excluded."""
    error: str | None = None
    """Why the run failed, one line."""
    eval_before: float | None = None
    """Held-out score of the weights that RL started from."""
    eval_after: float | None = None
    """Held-out score of the last weights."""
    samples_per_s: float | None = None
    """Episodes trained a second."""
    engine_utilisation: float | None = None
    """Share of the loop's wall time in which the engines generated, 0 to 1."""
    trainer_utilisation: float | None = None
    """Share of the loop's wall time in which the trainer trained, 0 to 1."""
    fates: Mapping[str, int] = field(default_factory=dict)
    """Groups by fate: `issued`, the five terminal fates, `in_flight`, `twice`. Empty for SFT."""
    report: str | None = None
    """Path of report.html."""

    @property
    def num_lost(self) -> int:
        """Groups issued that have no fate at all."""
        accounted = sum(self.fates.get(fate, 0) for fate in (*TERMINAL_FATES, "in_flight"))
        return self.fates.get("issued", 0) - accounted

    def lines(self) -> list[str]:
        """The summary for people, one fact a line."""
        lines = [f"{self.status} after {self.steps} steps in {format_seconds(self.seconds)}"]
        if self.error:
            lines.append(f"error: {self.error}")
        if self.eval_before is not None and self.eval_after is not None:
            gain = self.eval_after - self.eval_before
            lines.append(f"held-out score {self.eval_before:.3f} before RL, {self.eval_after:.3f} after ({gain:+.3f})")
        elif (score := self.eval_after if self.eval_after is not None else self.eval_before) is not None:
            lines.append(f"held-out score {score:.3f}")
        speed = [] if self.samples_per_s is None else [f"{self.samples_per_s:.2f} samples/s"]
        for who, share in (("engine", self.engine_utilisation), ("trainer", self.trainer_utilisation)):
            if share is not None:
                speed.append(f"{who} utilisation {share:.0%}")
        if speed:
            lines.append(", ".join(speed))
        if self.fates:
            lines.append(self.fates_line())
        if self.report:
            lines.append(f"report: {self.report}")
        return lines

    def fates_line(self) -> str:
        parts = " + ".join(f"{fate} {self.fates.get(fate, 0)}" for fate in TERMINAL_FATES)
        return (
            f"issued {self.fates.get('issued', 0)} = {parts}, in flight {self.fates.get('in_flight', 0)}: "
            f"{self.num_lost} lost, {self.fates.get('twice', 0)} twice"
        )


class Monitor(Protocol):
    """Receives what a run reports. Called from the driver only, never from two threads.

    Every method does nothing until a child overrides it, so a monitor of one's own is as long as what it does:

        class Loud(Monitor):
            def __init__(self, run: MonitoredRun, *, above: float = 0.9) -> None:
                self._above = above

            def log(self, step: int, metrics: Mapping[str, float]) -> None:
                if metrics.get("reward/mean", 0.0) > self._above:
                    print(f"step {step}: {metrics['reward/mean']}")

    and one line of the configuration: `monitor.custom = [{ name = "my_module:Loud", args = { above = 0.8 } }]`.
    """

    def __init__(self, run: MonitoredRun) -> None:
        """Made before anything of the run starts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one trained step; `monitor.names` is the catalogue. Steps never decrease but by `rewind`."""

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """More metrics of a step that has been logged, such as the score of an evaluation beside training."""

    def rewind(self, step: int) -> None:
        """The run is back at `step`: what was logged of later steps does not count, and they are logged again."""

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        """Something took from `start` to `end` (seconds since the epoch, `time.time()`) in `lane`."""

    def finish(self, summary: RunSummary) -> None:
        """The run ends; called once, also after a failure or Ctrl-C."""


class MultiMonitor(Monitor):
    """Feeds the run's own record (`required`) and any trackers (`optional`); the loop and the evaluation call it.

    An error of a required monitor ends the run: a run without its record is worth nothing. A tracker that fails
    is dropped with one warning: a web service that is down must not cost a night of training.
    """

    def __init__(self, required: Sequence[Monitor], optional: Sequence[Monitor] = ()) -> None:
        self._required = list(required)
        self._optional = list(optional)
        self._last_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step < self._last_step:
            raise StepError(f"Step {step} was logged after step {self._last_step}; steps never decrease.")
        self._last_step = step
        self._each(lambda monitor: monitor.log(step, metrics))

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda monitor: monitor.log_late(step, metrics))

    def rewind(self, step: int) -> None:
        self._last_step = step
        self._each(lambda monitor: monitor.rewind(step))

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        self._each(lambda monitor: monitor.event(name, start, end, lane))

    def finish(self, summary: RunSummary) -> None:
        self._each(lambda monitor: monitor.finish(summary))

    def _each(self, call: Callable[[Monitor], None]) -> None:
        for monitor in self._required:
            call(monitor)
        for monitor in tuple(self._optional):
            try:
                call(monitor)
            except Exception as error:  # the boundary: trackers raise whatever their network and disk raise
                self._optional.remove(monitor)
                logger.warning(
                    "%s failed and is switched off for the rest of this run: %s: %s. metrics.jsonl has everything.",
                    type(monitor).__name__,
                    type(error).__name__,
                    error,
                )
