"""The batches of a step before and after the backend works on them: checked, scored where it takes scores, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from miles_tito.shared.settings import SettingError

from miles_train.batch import Batch, MicroBatch
from miles_train.errors import BatchError
from miles_train.losses import AnyLoss
from miles_train.ranks import Ranks
from miles_train.trainer import ModelName

if TYPE_CHECKING:
    from miles_train.config import TrainConfig

ScoreFn = Callable[[Sequence[MicroBatch], ModelName], list[np.ndarray]]
"""`Trainer.score`, once the ranks have agreed to call it."""


def check_batches(batches: Sequence[Batch], *, vocab_size: int, config: TrainConfig) -> None:
    """Against the model and the configuration.

    Raises:
        BatchError: nothing to train, or a token that the model does not have.
        SettingError: the tokens were weighted for another normalisation.
    """
    if not batches or not all(batch.micro_batches for batch in batches):
        raise BatchError("There is nothing to train: a batch has no micro-batches.")
    for batch in batches:
        if batch.normalization != config.loss.normalization:
            raise SettingError(
                f'The batch was weighted for normalization "{batch.normalization}" but `loss.normalization` is '
                f'"{config.loss.normalization}". Pass the configured one to make_batch.'
            )
        for micro_batch in batch.micro_batches:
            low, high = int(micro_batch.tokens.min()), int(micro_batch.tokens.max())
            if low < 0 or high >= vocab_size:
                index = int(np.argmax((micro_batch.tokens < 0) | (micro_batch.tokens >= vocab_size)))
                raise BatchError(
                    f"Token {int(micro_batch.tokens[index])} of {micro_batch.where(index)} lies outside the model's "
                    f"vocabulary of {vocab_size}. Trainer and tokenizer must come from the same model folder."
                )


def lacks_reference(batches: Sequence[Batch], ranks: Ranks) -> bool:
    """Whether a loss token of some rank has no reference log-prob yet. Collective.

    Raises:
        BatchError: the ranks have other numbers of micro-batches, or other totals.
    """
    counts = [len(batch.micro_batches) for batch in batches]
    totals = [n for batch in batches for n in (batch.totals.num_episodes, batch.totals.num_loss_tokens)]
    ranks.check_equal("Numbers of micro-batches (one an optimizer step)", counts)
    ranks.check_equal("Totals of the batch (episodes, loss tokens)", totals)
    lacks = any(m.ref_logprobs is None and m.loss_mask.any() for batch in batches for m in batch.micro_batches)
    (some_lack,) = ranks.max([float(lacks)])
    return some_lack > 0


def with_scores(
    batches: Sequence[Batch], settings: AnyLoss, score: ScoreFn, *, some_lack_reference: bool
) -> list[Batch]:
    """Fill in the log-probs of the reference, and the trainer's own where later steps will need them."""
    scored = list(batches)
    if "reference" in settings.needs and some_lack_reference:
        scored = [_filled(batch, score, model="reference", column="ref_logprobs") for batch in scored]
    if "old_logprobs" in settings.needs and len(batches) > 1:
        scored = [_filled(batch, score, model="policy", column="old_logprobs") for batch in scored]
    return scored


def sizes(batches: Sequence[Batch], ranks: Ranks) -> dict[str, float]:
    """Metrics of what was trained. Collective."""
    (tokens,) = ranks.sum([float(sum(m.num_tokens for b in batches for m in b.micro_batches))])
    return {
        "batch/episodes": float(sum(batch.totals.num_episodes for batch in batches)),
        "batch/loss_tokens": float(sum(batch.totals.num_loss_tokens for batch in batches)),
        "batch/tokens": tokens,
        "batch/micro_batches": float(sum(len(batch.micro_batches) for batch in batches)),
    }


def _filled(batch: Batch, score: ScoreFn, *, model: ModelName, column: str) -> Batch:
    scores = score(batch.micro_batches, model)
    filled = (replace(m, **{column: s}) for m, s in zip(batch.micro_batches, scores, strict=True))
    return replace(batch, micro_batches=tuple(filled))
