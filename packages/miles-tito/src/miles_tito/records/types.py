"""What passes between the packages: prompts in, episodes and samples out.

Subscripts: T tokens of a trajectory, L layers with experts, K experts a token.
Every per-token array is as long as `tokens`. Records are frozen; arrays inside them are made read-only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from miles_tito.errors import RecordError, SampleError

from .arrays import per_token, readonly

Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, tool_calls, tool_call_id, …"""

UNKNOWN_VERSION = -1
"""Weight version of tokens whose engine named none."""


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
class Sampling:
    """How the policy samples. `temperature` is also the one that the trainer scores with."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    temperature: float = 1.0
    """Softmax temperature; log-probs are recorded at it, before top-k and top-p."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    max_tokens: int = 512
    """Upper bound on the tokens of one turn."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise RecordError(f"`temperature` is {self.temperature}; it must be 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise RecordError(f"`top_p` is {self.top_p}; it must lie in (0, 1].")
        if self.top_k == 0 or self.top_k < -1:
            raise RecordError(f"`top_k` is {self.top_k}; use -1 for the whole vocabulary or a positive number.")
        if not 0 <= self.min_p <= 1:
            raise RecordError(f"`min_p` is {self.min_p}; it must lie in [0, 1].")
        if self.max_tokens < 1:
            raise RecordError(f"`max_tokens` is {self.max_tokens}; a turn needs at least 1 token.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem: what the policy sees first, and what the environment needs to grade it."""

    id: str
    messages: tuple[Message, ...] | None = None
    tokens: np.ndarray | None = None
    """[P] int32, for environments that work on ids instead of messages."""
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Plain data for the environment: label, files, limits."""
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not self.id:
            raise RecordError("A Prompt needs a non-empty `id`; groups, the ledger and resume are keyed by it.")
        if self.tokens is not None:
            object.__setattr__(self, "tokens", readonly(self.tokens, np.int32, "tokens", ndim=1))
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an agent needs to talk to its session: point any OpenAI client at `base_url`."""

    base_url: str
    """Ends in `/v1`; append `/chat/completions`."""
    api_key: str
    model: str
    sampling: Sampling = field(default_factory=Sampling)
    session_id: str = ""


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
class VersionSpan:
    """Sampled tokens `[start, end)` of a trajectory came from weights `version`."""

    start: int
    end: int
    version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise RecordError(f"Version span [{self.start}, {self.end}) is empty or negative.")


class TrajectoryKind(StrEnum):
    """Why a trajectory exists beside its siblings in a session."""

    MAIN = "main"
    FORK = "fork"
    RETRY = "retry"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    TITLE = "title"


class FinishReason(StrEnum):
    """Why the last turn stopped."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One growing id sequence of a session: prompt, sampled tokens, tool results, sampled tokens, …"""

    id: str
    tokens: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool, True where the policy sampled the token and it is to be trained."""
    logprobs: np.ndarray
    """[T] float32, ln p(tokens[i] | tokens[:i]) at `temperature`, before top-k/top-p; 0.0 where not sampled."""
    versions: tuple[VersionSpan, ...] = ()
    """Sorted, disjoint; they cover every token with `loss_mask`."""
    parent_id: str | None = None
    kind: TrajectoryKind = TrajectoryKind.MAIN
    temperature: float = 1.0
    """The sampling temperature that `logprobs` were taken at."""
    routed_experts: np.ndarray | None = None
    """[T, L, K] smallest unsigned type; row i belongs to input token i. `routed_mask` says which rows are real."""
    routed_mask: np.ndarray | None = None
    """[T] bool, False where the engine sent no row (always the last)."""
    routed_layers: tuple[int, ...] = ()
    """Layer ids of the second axis."""
    finish_reason: FinishReason = FinishReason.STOP
    multimodal: Mapping[str, Any] | None = None
    """`images`: a list of url, digest, start (of its placeholders) and num_tokens."""
    adapter: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "tokens", readonly(self.tokens, np.int32, "tokens", ndim=1))
        length = len(self.tokens)
        set_(self, "loss_mask", per_token(self.loss_mask, np.bool_, "loss_mask", length))
        set_(self, "logprobs", per_token(self.logprobs, np.float32, "logprobs", length))
        check_versions(self.versions, self.loss_mask, f"trajectory {self.id}")
        check_logprobs(self.logprobs, self.loss_mask, f"trajectory {self.id}")
        if (self.routed_experts is None) != (self.routed_mask is None):
            raise RecordError("`routed_experts` and `routed_mask` come together: set both or neither.")
        if self.routed_experts is not None:
            experts = readonly(self.routed_experts, None, "routed_experts", ndim=3)
            if len(experts) != length or experts.dtype.kind != "u" or experts.shape[1] != len(self.routed_layers):
                raise RecordError(
                    f"`routed_experts` has shape {experts.shape} and type {experts.dtype}; with {length} tokens and "
                    f"{len(self.routed_layers)} layers it must be [{length}, {len(self.routed_layers)}, K] unsigned."
                )
            set_(self, "routed_experts", experts)
            set_(self, "routed_mask", per_token(self.routed_mask, np.bool_, "routed_mask", length))

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens to be trained: one that only serves as context makes nothing stale."""
        return min((s.version for s in self.versions if self.loss_mask[s.start : s.end].any()), default=None)

    @property
    def newest_version(self) -> int | None:
        """Of the tokens to be trained."""
        return max((s.version for s in self.versions if self.loss_mask[s.start : s.end].any()), default=None)


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
    """Seconds since 1970; None where nobody looked at the clock."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory ready for training. Build it with `miles_tito.to_samples`."""

    id: str
    episode_id: str
    group_id: str
    prompt_id: str
    tokens: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool."""
    logprobs: np.ndarray
    """[T] float32, the sampling policy's, see `Trajectory.logprobs`."""
    advantage: float | np.ndarray
    """One scalar, or [T] float32."""
    loss_denominator: int
    """Loss tokens of the whole episode."""
    versions: tuple[VersionSpan, ...] = ()
    temperature: float = 1.0
    reward: float | None = None
    routed_experts: np.ndarray | None = None
    routed_mask: np.ndarray | None = None
    routed_layers: tuple[int, ...] = ()
    multimodal: Mapping[str, Any] | None = None
    """Images beside the tokens, see `Trajectory.multimodal`."""
    ref_logprobs: np.ndarray | None = None
    """[T] float32, the reference policy's."""
    teacher_logprobs: np.ndarray | None = None
    """[T] float32, the teacher's."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "tokens", readonly(self.tokens, np.int32, "tokens", ndim=1, error=SampleError))
        length = len(self.tokens)
        for name, dtype in (("loss_mask", np.bool_), ("logprobs", np.float32)):
            set_(self, name, per_token(getattr(self, name), dtype, name, length, error=SampleError))
        for name in ("ref_logprobs", "teacher_logprobs"):
            if getattr(self, name) is not None:
                set_(self, name, per_token(getattr(self, name), np.float32, name, length, error=SampleError))
        if isinstance(self.advantage, np.ndarray):
            set_(self, "advantage", per_token(self.advantage, np.float32, "advantage", length, error=SampleError))
        if not np.isfinite(self.advantage).all():
            raise SampleError(f"`advantage` of sample {self.id} is not finite: {self.advantage}.")
        trained = int(self.loss_mask.sum())
        if self.loss_denominator < max(trained, 1):
            raise SampleError(
                f"`loss_denominator` of sample {self.id} is {self.loss_denominator} but the sample alone trains "
                f"{trained} tokens; it is the loss-token count of the whole episode and at least 1."
            )
        check_versions(self.versions, self.loss_mask, f"sample {self.id}", error=SampleError)
        check_logprobs(self.logprobs, self.loss_mask, f"sample {self.id}", error=SampleError)


def check_reward(outcome: Outcome, reward: float | None, error: str | None) -> None:
    """A graded outcome has a finite reward; any other has none and says why."""
    if outcome.has_reward:
        if reward is None or not np.isfinite(reward):
            raise RecordError(f"Outcome {outcome} needs a finite reward, got {reward!r}.")
    elif reward is not None:
        raise RecordError(f"Outcome {outcome} carries no reward, got {reward!r}: a failure is not a score.")
    elif outcome is not Outcome.CANCELLED and not error:
        raise RecordError(f"Outcome {outcome} needs an `error` that says what failed.")


def check_versions(
    versions: Sequence[VersionSpan],
    loss_mask: np.ndarray,
    where: str,
    *,
    error: type[RecordError] = RecordError,
) -> None:
    """Spans are sorted and disjoint, lie inside the tokens, and cover every trained token."""
    covered = np.zeros(len(loss_mask), dtype=np.bool_)
    end = 0
    for span in versions:
        if span.start < end or span.end > len(loss_mask):
            raise error(
                f"Version span [{span.start}, {span.end}) of {where} overlaps its predecessor (ends at {end}) "
                f"or leaves the {len(loss_mask)} tokens."
            )
        covered[span.start : span.end] = True
        end = span.end
    missing = np.flatnonzero(loss_mask & ~covered)
    if len(missing):
        raise error(
            f"{len(missing)} trained tokens of {where} have no weight version, the first at index {missing[0]}. "
            "Staleness counts from versions, so each sampled token needs one."
        )


def check_logprobs(
    logprobs: np.ndarray, loss_mask: np.ndarray, where: str, *, error: type[RecordError] = RecordError
) -> None:
    """Log-probs of trained tokens are finite and not above 0 (beyond rounding)."""
    bad = np.flatnonzero(loss_mask & ~(np.isfinite(logprobs) & (logprobs <= 1e-3)))
    if len(bad):
        raise error(
            f"{len(bad)} trained tokens of {where} have an impossible log-prob, the first at index {bad[0]}: "
            f"{logprobs[bad[0]]!r}. Expected a finite value ≤ 0."
        )
