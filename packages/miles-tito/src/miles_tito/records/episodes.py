"""One execution of a task, its siblings, the environment that runs it, and the training samples it becomes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from miles_tito.errors import RecordError, SampleError

from .prompts import Policy, Prompt
from .trajectories import Sample, Trajectory


class Outcome(StrEnum):
    """How an episode ended. Only the first two carry a reward."""

    GRADED = "graded"
    """The environment graded what the policy did."""
    POLICY_LIMIT = "policy_limit"
    """The policy ran out of turns, tokens or time; graded as it stands."""
    INFRA_ABORT = "infra_abort"
    """Something the policy cannot cause broke: engine, sandbox, network."""
    VERIFIER_INVALID = "verifier_invalid"
    """The grader raised, timed out, or returned no finite number."""
    CANCELLED = "cancelled"
    """The run stopped the episode."""

    @property
    def has_reward(self) -> bool:
        return self in (Outcome.GRADED, Outcome.POLICY_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ctx:
    """Where an episode runs: identity, deadline, cancellation, and the places it may use."""

    run_id: str
    episode_id: str
    attempt: int = 0
    deadline: float | None = None
    """Seconds on `time.monotonic()`; None for no limit."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    workdir: Path | None = None
    sandboxes: Any | None = None
    """The run's sandbox backend (miles-envs), None where the environment needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What an environment says about one episode. A failure has an `error` and no reward, never a reward of 0."""

    outcome: Outcome
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str | None = None

    def __post_init__(self) -> None:
        check_reward(self.outcome, self.reward, self.error)


@runtime_checkable
class Env(Protocol):
    """A task family: yields prompts, and runs one episode of a prompt against a policy."""

    def tasks(self, split: str) -> Iterable[Prompt]: ...

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt of an episode that ended without a verdict and was tried again."""

    attempt: int
    outcome: Outcome
    error: str | None
    seconds: float
    finished_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One execution of a task, however many trajectories its agent made."""

    id: str
    prompt_id: str
    group_id: str
    outcome: Outcome
    attempt: int = 0
    reward: float | None = None
    error: str | None = None
    trajectories: tuple[Trajectory, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    seconds: float = 0.0
    """Wall time of the execution, set-up and grading included."""
    finished_at: float | None = None
    """Seconds since 1970; None where it was not measured."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """Those before this one, `attempt`."""

    def __post_init__(self) -> None:
        check_reward(self.outcome, self.reward, self.error)
        object.__setattr__(self, "trajectories", tuple(self.trajectories))

    @property
    def loss_denominator(self) -> int:
        """Loss tokens of the whole episode, so that its weight does not depend on its number of trajectories."""
        return sum(t.num_loss_tokens for t in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """Staleness counts from the oldest token of any trajectory."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The sibling episodes of one prompt that share a baseline."""

    id: str
    prompt_id: str
    episodes: tuple[Episode, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "episodes", tuple(self.episodes))
        for episode in self.episodes:
            if episode.group_id != self.id or episode.prompt_id != self.prompt_id:
                raise RecordError(
                    f"Episode {episode.id} belongs to group {episode.group_id!r} and prompt {episode.prompt_id!r}, "
                    f"not to group {self.id!r} of prompt {self.prompt_id!r}."
                )
        ids = [episode.id for episode in self.episodes]
        if len(set(ids)) != len(ids):
            raise RecordError(f"Group {self.id} holds {len(ids)} episodes but only {len(set(ids))} distinct ids.")


def check_reward(outcome: Outcome, reward: float | None, error: str | None) -> None:
    """A graded outcome has a finite reward; any other has none and says why."""
    if outcome.has_reward:
        if reward is None or not np.isfinite(reward):
            raise RecordError(f"Outcome {outcome} needs a finite reward, got {reward!r}.")
    elif reward is not None:
        raise RecordError(f"Outcome {outcome} carries no reward, got {reward!r}: a failure is not a score.")
    elif outcome is not Outcome.CANCELLED and not error:
        raise RecordError(f"Outcome {outcome} needs an `error` that says what failed.")


def to_samples(episode: Episode, advantage: float | Mapping[str, np.ndarray]) -> list[Sample]:
    """One sample a trajectory that has a trained token.

    Each carries the loss tokens of the whole episode as `loss_denominator`: an episode weighs the same however many
    trajectories its agent made of it.

    Args:
        episode: graded, or at the policy's limit.
        advantage: one number for all tokens, or [T] values for each trajectory id.

    Raises:
        SampleError: the episode has no reward, or `advantage` misses a trajectory.
    """
    if not episode.outcome.has_reward:
        raise SampleError(
            f"Episode {episode.id} ended as {episode.outcome} ({episode.error}) and has no reward, so it cannot be "
            "trained; leave it out of the batch."
        )
    trained = [t for t in episode.trajectories if t.num_loss_tokens]
    if isinstance(advantage, Mapping):
        missing = [t.id for t in trained if t.id not in advantage]
        if missing:
            raise SampleError(
                f"`advantage` has {len(advantage)} trajectories but not {', '.join(missing)} of episode {episode.id}."
            )
    return [
        Sample(
            id=t.id,
            episode_id=episode.id,
            group_id=episode.group_id,
            prompt_id=episode.prompt_id,
            tokens=t.tokens,
            loss_mask=t.loss_mask,
            logprobs=t.logprobs,
            advantage=advantage[t.id] if isinstance(advantage, Mapping) else float(advantage),
            loss_denominator=episode.loss_denominator,
            versions=t.versions,
            temperature=t.temperature,
            reward=episode.reward,
            routed_experts=t.routed_experts,
            routed_mask=t.routed_mask,
            routed_layers=t.routed_layers,
            multimodal=t.multimodal,
            metadata={**t.metadata, "kind": str(t.kind), "finish_reason": str(t.finish_reason)},
        )
        for t in trained
    ]


def mask_older_versions(trajectory: Trajectory) -> Trajectory:
    """Train only the tokens that the newest weights sampled; those of older ones stay as context.

    For a trajectory that went on while the weights changed under it: what is left was sampled by one version, and the
    staleness of the trajectory is that version's.
    """
    newest = trajectory.newest_version
    if newest is None or newest == trajectory.oldest_version:
        return trajectory
    mask = np.zeros_like(trajectory.loss_mask)
    for span in trajectory.versions:
        if span.version == newest:
            mask[span.start : span.end] = trajectory.loss_mask[span.start : span.end]
    return replace(trajectory, loss_mask=mask)
