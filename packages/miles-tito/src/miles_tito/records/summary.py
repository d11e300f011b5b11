"""What the driver keeps of a group: lengths, rewards and versions, never token arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import UNKNOWN_VERSION, Episode, FailedAttempt, Group, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """Lengths and weight versions of one trajectory."""

    id: str
    num_tokens: int
    num_loss_tokens: int
    oldest_version: int | None
    """Of its trained tokens; None where there are none, or where the engine named no version. Negative for tokens of a
    branch that a resumed run left, see `miles_core.durable.ledger.queries`."""
    newest_version: int | None
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """Outcome, reward and trajectories of one episode, without arrays; filters, policies and the ledger read it."""

    id: str
    outcome: Outcome
    reward: float | None
    error: str | None
    attempt: int
    seconds: float
    metrics: Mapping[str, float]
    trajectories: tuple[TrajectorySummary, ...]
    finished_at: float | None = None
    """Seconds since 1970."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """Those before this one."""

    @property
    def num_loss_tokens(self) -> int:
        return sum(t.num_loss_tokens for t in self.trajectories)

    @property
    def is_versioned(self) -> bool:
        """Whether the engine named the version of every trained token."""
        return all(t.oldest_version is not None for t in self.trajectories if t.num_loss_tokens)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens whose version is known."""
        return min((t.oldest_version for t in self.trajectories if t.oldest_version is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """A finished group as the buffer holds it: its summary, and a handle to fetch the arrays with."""

    id: str
    prompt_id: str
    episodes: tuple[EpisodeSummary, ...]
    handle: Any = None
    """The Group itself in one process, a Ray ObjectRef across processes."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """[episodes] raw outcome of each sibling, None where it has none."""
        return tuple(episode.reward for episode in self.episodes)

    @property
    def num_rewarded(self) -> int:
        """Siblings that have a reward."""
        return sum(episode.reward is not None for episode in self.episodes)

    @property
    def is_versioned(self) -> bool:
        """Whether the engine named the version of every trained token."""
        return all(episode.is_versioned for episode in self.episodes)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens whose version is known."""
        return min((e.oldest_version for e in self.episodes if e.oldest_version is not None), default=None)


def summarize(group: Group, *, handle: Any = None) -> GroupRef:
    """The summary of `group`, with `handle` (by default the group itself) to fetch its arrays."""
    return GroupRef(
        id=group.id,
        prompt_id=group.prompt_id,
        episodes=tuple(_episode(e) for e in group.episodes),
        handle=group if handle is None else handle,
        metadata=group.metadata,
    )


def _episode(episode: Episode) -> EpisodeSummary:
    return EpisodeSummary(
        id=episode.id,
        outcome=episode.outcome,
        reward=episode.reward,
        error=episode.error,
        attempt=episode.attempt,
        seconds=episode.seconds,
        metrics=dict(episode.metrics),
        trajectories=tuple(
            TrajectorySummary(
                id=t.id,
                num_tokens=len(t.tokens),
                num_loss_tokens=t.num_loss_tokens,
                oldest_version=_known(t.oldest_version),
                newest_version=_known(t.newest_version),
                finish_reason=str(t.finish_reason),
            )
            for t in episode.trajectories
        ),
        finished_at=episode.finished_at,
        failed_attempts=episode.failed_attempts,
    )


def _known(version: int | None) -> int | None:
    return None if version == UNKNOWN_VERSION else version
