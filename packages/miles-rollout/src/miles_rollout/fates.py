"""What became of each group: one fate at a time, exactly one at the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from .errors import BufferStateError


class Fate(StrEnum):
    """Where an issued group stands. The first two are open, the others are final."""

    IN_FLIGHT = "in_flight"
    """Issued; its episodes run."""
    BUFFERED = "buffered"
    """Finished and admitted; waits for a step, or is in one that is not committed yet."""
    TRAINED = "trained"
    """The engines hold weights that were trained on it."""
    FILTERED = "filtered"
    """Discarded for what it contains."""
    STALE = "stale"
    """Discarded for its age."""
    FAILED = "failed"
    """Too few of its episodes got a reward."""
    ABORTED = "aborted"
    """The run ended, or something broke, before it could be trained."""

    @property
    def is_final(self) -> bool:
        return self not in (Fate.IN_FLIGHT, Fate.BUFFERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FateEvent:
    """One change of fate, as an observer (the ledger) receives it."""

    group_id: str
    prompt_id: str
    fate: Fate
    reason: str = ""
    """Short and countable, empty where there is nothing to say."""
    version: int
    """Weight version that the engines held when it happened; for TRAINED the version that contains the group."""
    retry_of: str | None = None
    """The stale group whose prompt this one runs again."""
    drawn: int | None = None
    """With IN_FLIGHT: prompts drawn from the stream so far, this group's included. Where a resumed run goes on."""
    will_retry: bool = False
    """With a discarding fate: its prompt will be issued again, as a group whose `retry_of` is this one."""


Observer = Callable[[FateEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FateCounts:
    """Groups per fate, for metrics and the proof at the end. `issued` is counted on its own: a lost group shows."""

    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    aborted: int
    in_flight: int
    """Running, buffered, or in a step that is not committed."""
    twice: int
    """Attempts to give a second final fate; each was refused with an error."""

    @property
    def lost(self) -> int:
        return self.issued - (self.trained + self.filtered + self.stale + self.failed + self.aborted + self.in_flight)

    def proof(self) -> str:
        """The sum that must hold, with its numbers: nothing lost, nothing used twice."""
        sign = "=" if self.lost == 0 and self.in_flight == 0 else "≠"
        return (
            f"issued {sign} trained + filtered + stale + failed + aborted, in flight {self.in_flight}: "
            f"{self.lost} lost, {self.twice} twice "
            f"(groups: {self.issued} {sign} {self.trained} + {self.filtered} + {self.stale} + {self.failed} "
            f"+ {self.aborted})"
        )


RECENT = 1 << 16
"""Final fates that a book remembers by id. An observer that keeps them all (the ledger) refuses what comes later."""


class FateBook:
    """The fate of every open group and of the last `RECENT` others; `GroupBuffer` changes fates here alone."""

    def __init__(self, *, observer: Observer | None = None) -> None:
        self._fates: dict[str, Fate] = {}
        """Of open groups and of those in `_recent`."""
        self._recent: deque[str] = deque()
        """Groups with a final fate, oldest first."""
        self._prompt_ids: dict[str, str] = {}
        self._final: Counter[Fate] = Counter()
        self._issued = 0
        self._twice = 0
        self._observe: Observer = observer or (lambda event: None)

    def restore(self, counts: FateCounts, open_groups: Iterable[tuple[str, str, Fate]]) -> None:
        """Go on from an earlier run's counts and its open groups: id, prompt id, fate. The observer knows them."""
        if self._issued:
            raise BufferStateError(f"{self._issued} groups were issued already; a book is restored before its first.")
        for group_id, prompt_id, fate in open_groups:
            self._fates[group_id] = fate
            self._prompt_ids[group_id] = prompt_id
        if len(self._prompt_ids) != counts.in_flight:
            raise BufferStateError(f"{len(self._prompt_ids)} open groups are restored, counted are {counts.in_flight}.")
        self._issued = counts.issued
        self._final = Counter({fate: getattr(counts, fate) for fate in Fate if fate.is_final})
        self._twice = counts.twice

    def issue(
        self, group_id: str, *, prompt_id: str, version: int, retry_of: str | None = None, drawn: int | None = None
    ) -> int:
        """A new group; returns how many were issued with it."""
        if group_id in self._fates:
            raise BufferStateError(
                f"Group {group_id!r} was already issued and is {self._fates[group_id]}; every issue needs a new id."
            )
        fate = Fate.IN_FLIGHT
        self._observe(
            FateEvent(
                group_id=group_id, prompt_id=prompt_id, fate=fate, version=version, retry_of=retry_of, drawn=drawn
            )
        )
        self._issued += 1  # only now: what the observer refuses is not issued
        self._prompt_ids[group_id] = prompt_id
        self._fates[group_id] = fate
        return self._issued

    def advance(self, group_id: str, fate: Fate, *, reason: str = "", version: int, will_retry: bool = False) -> None:
        """Give an open group its next fate; a final fate is never replaced. It holds even if the observer raises."""
        self.require_open(group_id, wanted=fate)
        prompt_id = self._prompt_ids[group_id]
        self._fates[group_id] = fate
        if fate.is_final:
            self._final[fate] += 1
            del self._prompt_ids[group_id]
            self._recent.append(group_id)
            if len(self._recent) > RECENT:
                del self._fates[self._recent.popleft()]
        self._observe(
            FateEvent(
                group_id=group_id,
                prompt_id=prompt_id,
                fate=fate,
                reason=reason,
                version=version,
                will_retry=will_retry,
            )
        )

    def require_open(self, group_id: str, *, wanted: Fate) -> None:
        """Raise unless the group is known and has no final fate yet."""
        fate = self._fates.get(group_id)
        if fate is None:
            raise BufferStateError(
                f"Group {group_id!r} was never issued (or ended more than {RECENT} groups ago), so it cannot become "
                f"{wanted}; call `acquire` and `issue` before its episodes start."
            )
        if fate.is_final:
            self._twice += 1
            raise BufferStateError(
                f"Group {group_id!r} is already {fate} and cannot become {wanted}: a group has one final fate."
            )

    def fate(self, group_id: str) -> Fate | None:
        """The group's present fate, None if it was never issued or ended long ago."""
        return self._fates.get(group_id)

    def counts(self) -> FateCounts:
        final = {fate.value: self._final[fate] for fate in Fate if fate.is_final}
        return FateCounts(issued=self._issued, in_flight=len(self._prompt_ids), twice=self._twice, **final)
