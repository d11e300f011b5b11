"""What a policy sampled, token by token, and the training sample that it becomes.

Subscripts: T tokens of a trajectory, L layers with experts, K experts a token. Every per-token array is as long as
`tokens`. Records are frozen; arrays inside them are made read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from miles_tito.errors import RecordError, SampleError

from .arrays import per_token, readonly

UNKNOWN_VERSION = -1
"""Weight version of tokens whose engine named none."""


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
    """Why a trajectory exists beside its siblings in a session: the main conversation, or a way off it."""

    MAIN = "main"
    FORK = "fork"
    RETRY = "retry"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    TITLE = "title"


class FinishReason(StrEnum):
    """Why sampling stopped at the end of the last turn."""

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
class Sample:
    """One trajectory ready for training; `miles_tito.to_samples` builds it once its advantage is known."""

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
