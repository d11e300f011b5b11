"""What every monitor answers, and the one that feeds all monitors of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miles_tito.errors import MilesError

from .summary import RunSummary

logger = logging.getLogger(__name__)


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
