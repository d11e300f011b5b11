"""What a stopped run leaves for the one that goes on: its counts, its open groups, the prompts that run again."""

from __future__ import annotations

from dataclasses import dataclass

from miles_tito import GroupRef, Prompt

from .fates import FateCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A prompt that runs again because a policy said so of its group."""

    prompt: Prompt
    retry_of: str
    """Id of the stale group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedGroup:
    """A group without a final fate. It keeps its id: what runs again is another attempt, not another group."""

    id: str
    prompt: Prompt
    issued_version: int
    """Weight version at its issue, on the branch that the run goes on from."""
    ref: GroupRef | None = None
    """Its result, if it has finished; without one its episodes run again as soon as there is a credit for them."""
    is_admitted: bool = False
    """The buffer had admitted it: filter and policies at `put` are behind it."""
    attempt: int = 0
    """Number of its next attempt, above those that were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a run goes on: what `GroupBuffer.restore` and `produce` are given."""

    counts: FateCounts
    groups: tuple[ResumedGroup, ...] = ()
    """Every open group, in the order of their issue."""
    retries: tuple[Retry, ...] = ()
    """Prompts of discarded groups that have not been issued again yet."""
    next_group: int = 0
    """Number of the next group id."""
