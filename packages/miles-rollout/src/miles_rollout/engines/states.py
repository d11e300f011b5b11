"""The states of one engine, and which may follow which.

```
 STARTING ──▶ HEALTHY ◀──▶ SUSPECT
     │         ▲  │          │
     └──▶ DEAD │◀─┴──────────┘        DEAD ──▶ GIVEN_UP
           │   │
           ▼   └──────────┐
       RESTARTING ──▶ SYNCING         either goes back to DEAD when it fails
```
There is no way from DEAD to HEALTHY but through SYNCING: an engine that was gone holds other weights than the run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from miles_rollout.engines.errors import EngineStateError


class EngineState(StrEnum):
    """What a supervised engine may be used for now."""

    STARTING = "starting"
    """Comes up for the first time."""
    HEALTHY = "healthy"
    """Holds the run's weights and gets requests."""
    SUSPECT = "suspect"
    """Missed probes; still gets requests."""
    DEAD = "dead"
    """Exited, does not answer, or failed a weight update: gets no requests."""
    RESTARTING = "restarting"
    """Is started again, or waited for where somebody else runs it."""
    SYNCING = "syncing"
    """Answers, and receives the run's weights."""
    GIVEN_UP = "given_up"
    """Failed too often; stays out of the run."""

    @property
    def is_serving(self) -> bool:
        """Gets requests, and takes part in every weight update."""
        return self in (EngineState.HEALTHY, EngineState.SUSPECT)


_FOLLOWS: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset({EngineState.HEALTHY, EngineState.DEAD}),
    EngineState.HEALTHY: frozenset({EngineState.SUSPECT, EngineState.DEAD}),
    EngineState.SUSPECT: frozenset({EngineState.HEALTHY, EngineState.DEAD}),
    EngineState.DEAD: frozenset({EngineState.RESTARTING, EngineState.GIVEN_UP}),
    EngineState.RESTARTING: frozenset({EngineState.SYNCING, EngineState.DEAD}),
    EngineState.SYNCING: frozenset({EngineState.HEALTHY, EngineState.DEAD}),
    EngineState.GIVEN_UP: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One change of state, as a ledger or a monitor receives it."""

    url: str
    old: EngineState
    new: EngineState
    reason: str


class EngineLife:
    """The state of one engine, which `SupervisedEngine` changes; refuses what the diagram does not have."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._state = EngineState.STARTING

    @property
    def state(self) -> EngineState:
        return self._state

    def move(self, new: EngineState, reason: str) -> EngineEvent:
        """Change the state.

        Raises:
            EngineStateError: `new` cannot follow the present state.
        """
        if new not in _FOLLOWS[self._state]:
            allowed = ", ".join(sorted(_FOLLOWS[self._state])) or "nothing"
            raise EngineStateError(
                f"The engine at {self.url} is {self._state} and cannot become {new} ({reason}); {allowed} may follow."
            )
        event = EngineEvent(url=self.url, old=self._state, new=new, reason=reason)
        self._state = new
        return event
