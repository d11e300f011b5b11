"""What a push says about itself. Plain data: it may be pickled, logged and read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PHASES = ("pause", "write", "send", "load", "verify", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutcome:
    """How one push ended on one engine."""

    url: str
    ok: bool
    phase: str | None = None
    """Phase that failed; None when the engine serves the new version."""
    error: str | None = None
    written: bool = False
    """Whether a bucket may have reached the engine. If so and not `ok`, its weights are mixed and it stays paused."""
    cache_flushed: bool = False
    """Whether the prefix cache of the old version was dropped; False only for `in_place` with requests running."""
    verified: Literal["all", "part", "none"] = "none"
    """`all`: every parameter's checksum equals the trainer's. `part`: only those whose layout is known."""
    num_verified: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds spent in the requests of each phase (pause, load, verify, resume)."""
    pause_seconds: float = 0.0
    """From the pause request until generation continued, or until now where it did not."""
    kind: Literal["full", "delta"] | None = None
    """What was sent in the `staged` way, or put into the store; None where the store had the version already."""
    reason: str | None = None
    """Why a full push and no delta; in the `store` way why either."""
    bytes: int = 0
    """Bytes written to this engine in the `staged` way."""
    serves: int | None = None
    """Version whose weights the engine holds whole, in the `staged` way; None when that is not known. In the `store`
    way the one that it says it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One version, pushed to every engine."""

    version: int
    bytes: int
    """Bytes of weights staged once, whatever the number of engines; in the `store` way bytes put."""
    num_tensors: int
    num_buckets: int
    seconds: Mapping[str, float]
    """Per phase: `write` and `send` as the leader saw them, the others the slowest engine's."""
    pause_seconds: float
    """The longest pause of any engine."""
    total_seconds: float
    engines: tuple[EngineOutcome, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """Flat numbers for a monitor."""
        return {
            "sync/bytes": float(self.bytes),
            "sync/pause_seconds": self.pause_seconds,
            "sync/total_seconds": self.total_seconds,
            **{f"sync/{phase}_seconds": self.seconds.get(phase, 0.0) for phase in PHASES},
        }


def summarize(
    *,
    version: int,
    num_bytes: int,
    num_tensors: int,
    num_buckets: int,
    leader_seconds: Mapping[str, float],
    total_seconds: float,
    engines: tuple[EngineOutcome, ...],
) -> SyncReport:
    """Fold the outcomes of all engines into one report."""
    slowest = {phase: max((e.seconds.get(phase, 0.0) for e in engines), default=0.0) for phase in PHASES}
    return SyncReport(
        version=version,
        bytes=num_bytes,
        num_tensors=num_tensors,
        num_buckets=num_buckets,
        seconds={phase: leader_seconds.get(phase, slowest[phase]) for phase in PHASES},
        pause_seconds=max((e.pause_seconds for e in engines), default=0.0),
        total_seconds=total_seconds,
        engines=engines,
    )
