"""What a run says about itself when it ends: the last lines of the console, `summary.json`, the head of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TERMINAL_FATES = ("trained", "filtered", "stale", "failed", "aborted")


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
        speed = [
            _share("engine utilisation", self.engine_utilisation),
            _share("trainer utilisation", self.trainer_utilisation),
        ]
        if self.samples_per_s is not None:
            speed.insert(0, f"{self.samples_per_s:.2f} samples/s")
        if speed := [part for part in speed if part]:
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


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 10 min`."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _share(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.0%}"
