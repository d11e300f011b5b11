"""Faults as data: what goes wrong in which start of a run, and at which occasion."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    """A key of `KINDS`."""
    start: int
    """Number of the start of the run in which it happens, from 0."""
    nth: int
    """At which occasion of its kind, from 1; one that a start does not reach does not happen."""

    def __str__(self) -> str:
        return f"start {self.start}: {KINDS[self.kind].text}, at occasion {self.nth}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    text: str
    occasions: int
    """About how many occasions a start of a small run has."""
    weight: float = 1.0
    """How often it is drawn, against the others."""
    ends_with: str = ""
    """Class of the error that it may end a start with; none where the run has to go on by itself."""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind("the driver is killed between two events", 4000, 6),
        "kill_before_write": Kind("the driver is killed before a write to the disk", 250, 2),
        "kill_in_write": Kind("the driver is killed in the middle of a write", 250, 2),
        "kill_after_write": Kind("the driver is killed after a write to the disk", 250, 2),
        "interrupt": Kind("Ctrl-C", 4000, 2),
        "full_spool": Kind("the disk is full for the spool", 40, 0.7, "SpoolError"),
        "full_metrics": Kind("the disk is full for metrics.jsonl", 8, 0.7, "OSError"),
        "full_checkpoint": Kind("the disk is full for a checkpoint", 20, 0.7, "CheckpointError"),
        "full_ledger": Kind("the disk is full for the ledger", 150, 0.7, "LedgerError"),
        "trainer_lost": Kind("a trainer rank dies before it does what it is asked", 40, 3),
        "trainer_lost_after": Kind("a trainer rank dies after it did what it was asked", 40, 3),
        "push_fails": Kind("an engine refuses a push", 12, 2),
        "engine_dies": Kind("an engine dies while it samples", 300, 2),
        "engine_hangs": Kind("an engine hangs while it samples", 300, 2),
        "request_lost": Kind("an engine swallows a request", 80, 2),
        "reply_late": Kind("an answer of an engine comes very late", 80, 2),
        "router_dies": Kind("the router dies", 80, 1),
        "session_error": Kind("the session server does not answer", 160, 1),
        "sessions_lost": Kind("the session server restarts without its sessions", 160, 1),
        "env_raises": Kind("an environment raises", 50, 1),
        "env_hangs": Kind("an environment hangs", 50, 1),
        "env_stays": Kind("an environment hangs and swallows its cancellation", 50, 1),
        "env_slow": Kind("an environment is slow", 50, 2),
        "verifier_fails": Kind("a reward fails", 50, 1),
        "worker_dies": Kind("a worker dies while it runs groups", 25, 2),
    }
)
"""Everything that can go wrong."""

MOST_STARTS = 4


def draw_faults(seed: int, occasions: Mapping[str, int] | None = None) -> tuple[Fault, ...]:
    """The faults of `seed`: a few of any kind in each of the first starts, and none in those that follow.

    Args:
        occasions: how many of each kind a run without faults has, where it is not the small one of `KINDS`.
    """
    dice = random.Random(f"chaos/{seed}")
    occasions = occasions or {name: kind.occasions for name, kind in KINDS.items()}
    names = [name for name in KINDS if occasions.get(name)]
    weights = [KINDS[name].weight for name in names]
    faults: dict[tuple[str, int, int], Fault] = {}
    for start in range(dice.randint(1, MOST_STARTS)):
        for kind in dice.choices(names, weights, k=dice.randint(1, 4)):
            most = occasions[kind]
            nth = dice.randint(1, most if dice.random() < 0.8 else max(1, most // 8))  # beginnings are worth a look
            faults[kind, start, nth] = Fault(kind=kind, start=start, nth=nth)
    return tuple(sorted(faults.values(), key=lambda fault: (fault.start, fault.kind, fault.nth)))
