"""When an engine counts as suspect or dead, and how often it is started again: the `[engines.NAME.health]` table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_tito.shared.backoff import delay_s
from miles_tito.shared.settings import at_least, require


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Thresholds of the supervision of engines."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    probe_interval_s: float = 2.0
    """Seconds between two questions whether the server answers. Its process is watched besides: an exit shows at
    once."""
    progress_interval_s: float = 15.0
    """Seconds between two proofs that tokens still come out of it; on an idle engine each costs one token."""
    suspect_after: int = 2
    """Failed probes in a row after which an engine is suspect. It keeps its traffic."""
    dead_after_s: float = 60.0
    """Seconds without a good probe after which an engine is dead: it loses its traffic and is started again."""
    max_restarts: int = 5
    """Restarts without a healthy spell between them, after which an engine is given up."""
    healthy_spell_s: float = 300.0
    """Healthy seconds after which earlier restarts no longer count."""
    backoff_s: float = 1.0
    """Wait before the first restart; it doubles with each further one."""
    backoff_max_s: float = 60.0
    """Longest wait before a restart."""
    pause_limit_s: float = 1800.0
    """How long the run waits while no engine is healthy, before it ends with an error."""

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "progress_interval_s", "dead_after_s", "backoff_s", "pause_limit_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "positive")
        at_least(self, 1, "suspect_after")
        at_least(self, 0, "max_restarts", "healthy_spell_s")
        require(
            self.backoff_max_s >= self.backoff_s,
            "backoff_max_s",
            self.backoff_max_s,
            f"at least `backoff_s`, which is {self.backoff_s}",
        )

    def backoff(self, restarts: int) -> float:
        """Seconds to wait before the restart that follows `restarts` others."""
        return delay_s(restarts, first_s=self.backoff_s, longest_s=self.backoff_max_s)


class ProbeRecord:
    """How one kind of probe of an engine has gone lately; its watcher adds each answer."""

    def __init__(self, now: float) -> None:
        self.last_good = now
        """Time of the last good answer, on the event loop's clock."""
        self.misses = 0
        """Bad answers in a row."""
        self.problem = ""
        """Of the last bad answer."""

    def add(self, problem: str | None, now: float) -> None:
        """One answer: what was wrong with it, None for a good one."""
        if problem is None:
            self.last_good, self.misses = now, 0
        else:
            self.misses, self.problem = self.misses + 1, problem


def worst(records: Sequence[ProbeRecord], *, suspect_after: int) -> ProbeRecord | None:
    """Of the probes that make an engine suspect, the one without a good answer for the longest."""
    missing = [record for record in records if record.misses >= suspect_after]
    return min(missing, key=lambda record: record.last_good, default=None)
