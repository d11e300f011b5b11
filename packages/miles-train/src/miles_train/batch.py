"""What one rank trains on: packed rows whose weights make the loss of the whole batch a plain weighted sum.

Subscripts: N packed tokens of a micro-batch, R its rows, M its loss tokens.

The weight of a token is decided from totals of the *whole* batch, so neither the split into micro-batches nor the
split over ranks can change a gradient: loss = sum over ranks, micro-batches and tokens of weight · token_loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from miles_tito.records import UNKNOWN_VERSION, Sample

from .errors import BatchError
from .losses.settings import Normalization


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Counts over all rows of all ranks that share an optimizer step; the planner makes them."""

    num_episodes: int
    """Episodes with at least one loss token."""
    num_loss_tokens: int

    def __post_init__(self) -> None:
        if self.num_episodes < 1 or self.num_loss_tokens < self.num_episodes:
            raise BatchError(
                f"A batch of {self.num_episodes} episodes and {self.num_loss_tokens} loss tokens cannot be trained; "
                "it needs at least one episode, and a loss token in each. Leave empty batches out."
            )

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> BatchTotals:
        """Totals of a batch that lies in one process."""
        counts = [(sample.episode_id, int(sample.loss_mask.sum())) for sample in samples]
        return cls(num_episodes=len({e for e, n in counts if n}), num_loss_tokens=sum(n for _, n in counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows packed one after another for one forward and backward pass. Token i is predicted at i - 1."""

    tokens: np.ndarray
    """[N] int32."""
    positions: np.ndarray
    """[N] int32, index inside the row."""
    cu_seqlens: np.ndarray
    """[R + 1] int32, where rows begin; the last entry is N."""
    loss_mask: np.ndarray
    """[N] bool."""
    logprobs: np.ndarray
    """[N] float32, the sampling engine's; 0 outside the mask."""
    advantages: np.ndarray
    """[N] float32; 0 outside the mask."""
    weights: np.ndarray
    """[N] float32, share of the token in the loss of the whole batch; 0 outside the mask."""
    temperatures: np.ndarray
    """[N] float32, what the token was sampled at."""
    versions: np.ndarray
    """[N] int32 weight version that sampled the token, -1 where unknown."""
    sample_ids: tuple[str, ...]
    """[R]."""
    ref_logprobs: np.ndarray | None = None
    """[N] float32, the reference policy's."""
    old_logprobs: np.ndarray | None = None
    """[N] float32, the trainer's own before its first optimizer step on this batch."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return np.diff(self.cu_seqlens)

    def rows_at(self, indices: np.ndarray) -> np.ndarray:
        """Row of each packed index."""
        return np.searchsorted(self.cu_seqlens, indices, side="right") - 1

    def where(self, index: int) -> str:
        """Name a packed index for an error message."""
        row = int(self.rows_at(np.array([index]))[0])
        return f"sample {self.sample_ids[row]}, position {index - int(self.cu_seqlens[row])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of one optimizer step: `make_batch` packs it, `Trainer.train` takes it."""

    micro_batches: tuple[MicroBatch, ...]
    """As many as on every other rank."""
    totals: BatchTotals
    normalization: Normalization
    """How the weights of the micro-batches were made."""


def make_batch(
    rows: Sequence[Sequence[Sample]],
    totals: BatchTotals,
    *,
    normalization: Normalization = "episode",
    max_tokens: int | None = None,
) -> Batch:
    """Pack this rank's samples, micro-batch by micro-batch.

    Args:
        rows: `[micro-batches][rows]`; an empty micro-batch becomes a dummy of zero weight.
        totals: counts over all ranks, from the driver.
        normalization: see `LossSettings.normalization`.
        max_tokens: the constant of `dr_grpo`.
    """
    if normalization == "dr_grpo" and max_tokens is None:
        raise BatchError('normalization = "dr_grpo" divides by a constant number of tokens: set `max_tokens`.')
    micro_batches = tuple(
        _micro_batch(samples, totals, normalization=normalization, max_tokens=max_tokens) for samples in rows
    )
    return Batch(micro_batches=micro_batches, totals=totals, normalization=normalization)


def token_weight(sample: Sample, totals: BatchTotals, *, normalization: Normalization, max_tokens: int | None) -> float:
    """Share of each loss token of `sample` in the loss of the whole batch."""
    match normalization:
        case "episode":
            return 1.0 / (totals.num_episodes * sample.loss_denominator)
        case "token":
            return 1.0 / totals.num_loss_tokens
        case "dr_grpo":
            assert max_tokens is not None, "checked by make_batch"
            return 1.0 / (totals.num_episodes * max_tokens)


def _micro_batch(
    samples: Sequence[Sample], totals: BatchTotals, *, normalization: Normalization, max_tokens: int | None
) -> MicroBatch:
    if not samples:
        return _dummy()
    for sample in samples:
        _check_sample(sample)
    lengths = np.array([len(sample.tokens) for sample in samples])
    mask = np.concatenate([sample.loss_mask for sample in samples])
    weights = [token_weight(s, totals, normalization=normalization, max_tokens=max_tokens) for s in samples]

    def packed(columns: Iterable[np.ndarray | float]) -> np.ndarray:
        """[N] float32 of per-row scalars or arrays, 0 outside the mask (whatever stood there, NaN included)."""
        filled = [np.broadcast_to(np.float32(c), (n,)) for c, n in zip(columns, lengths, strict=True)]
        return np.where(mask, np.concatenate(filled), np.float32(0))

    refs = [sample.ref_logprobs for sample in samples]
    has_reference = all(ref is not None for ref in refs)
    return MicroBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=mask,
        logprobs=packed(sample.logprobs for sample in samples),
        advantages=packed(sample.advantage for sample in samples),
        weights=packed(weights),
        temperatures=np.repeat(np.array([s.temperature for s in samples], dtype=np.float32), lengths),
        versions=np.concatenate([_versions(sample) for sample in samples]),
        sample_ids=tuple(sample.id for sample in samples),
        ref_logprobs=packed(ref for ref in refs if ref is not None) if has_reference else None,
    )


def _check_sample(sample: Sample) -> None:
    if not len(sample.tokens):
        raise BatchError(f"Sample {sample.id} has no tokens.")
    if sample.loss_mask[0]:
        raise BatchError(
            f"Sample {sample.id} trains its first token, which nothing predicts. Begin every sample with a prompt "
            "or a start token outside the loss mask."
        )
    if not sample.temperature > 0:
        raise BatchError(
            f"Sample {sample.id} was sampled at temperature {sample.temperature}: greedy tokens have no sampling "
            "distribution to take a gradient of. Train on samples drawn at a temperature above 0."
        )
    if sample.ref_logprobs is not None:
        bad = np.flatnonzero(sample.loss_mask & ~np.isfinite(sample.ref_logprobs))
        if len(bad):
            raise BatchError(
                f"`ref_logprobs` of sample {sample.id} is {sample.ref_logprobs[bad[0]]} at position {bad[0]}, a token "
                f"that is trained ({len(bad)} such positions). Score the sample again, or leave it out."
            )


def _versions(sample: Sample) -> np.ndarray:
    versions = np.full(len(sample.tokens), UNKNOWN_VERSION, dtype=np.int32)
    for span in sample.versions:
        versions[span.start : span.end] = span.version
    return versions


def _dummy() -> MicroBatch:
    """One token without a loss: keeps a rank in step where it has no rows."""
    zeros = np.zeros(1, dtype=np.float32)
    return MicroBatch(
        tokens=np.zeros(1, dtype=np.int32),
        positions=np.zeros(1, dtype=np.int32),
        cu_seqlens=np.array([0, 1], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=np.bool_),
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        temperatures=np.ones(1, dtype=np.float32),
        versions=np.full(1, UNKNOWN_VERSION, dtype=np.int32),
        sample_ids=("(empty micro-batch)",),
    )
