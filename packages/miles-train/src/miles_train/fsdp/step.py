"""Forward and backward passes over the micro-batches of one optimizer step.

Subscripts: M loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from miles_train.batch import Batch, MicroBatch
from miles_train.config import LossConfig
from miles_train.errors import BatchError, NumericsError
from miles_train.logprobs import TokenScores
from miles_train.losses import LossFn, LossInputs, TokenLoss
from miles_train.metrics import Tally, tally_gap, tally_loss, tally_ratio

from .inputs import loss_indices, model_inputs
from .model import PolicyModel
from .ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is looked at once all gradients are there, so that every rank stops together."""

    micro_batch: MicroBatch
    indices: np.ndarray
    logprobs: Tensor
    """[M]."""
    loss: Tensor
    """[M]."""


def score_micro_batches(
    model: PolicyModel, micro_batches: Sequence[MicroBatch], device: torch.device
) -> list[np.ndarray]:
    """Log-probs of the loss tokens without a gradient; [N] float32 a micro-batch, 0 outside the mask."""
    scored: list[np.ndarray] = []
    with torch.no_grad():
        for micro_batch in micro_batches:
            indices = loss_indices(micro_batch)
            scores = model(model_inputs(micro_batch, indices, padded=model.padded, device=device), entropy=False)
            row = np.zeros(micro_batch.num_tokens, dtype=np.float32)
            if len(indices):
                row[indices] = scores.logprobs.cpu().numpy()
            scored.append(row)
    model.reshard()
    return scored


def accumulate(
    model: PolicyModel,
    batch: Batch,
    *,
    loss_fn: LossFn,
    config: LossConfig,
    ranks: Ranks,
    tally: Tally,
    version: int,
    is_first: bool,
) -> None:
    """Leave the gradient of the whole batch in the parameters, reduced over ranks in the last micro-batch only.

    Args:
        version: of the weights before the first optimizer step of this batch of episodes.
        is_first: no optimizer step has been taken since.

    Raises:
        NumericsError: on every rank, when a log-prob or a loss of any rank is not finite.
    """
    checked: list[Checked] = []
    for index, micro_batch in enumerate(batch.micro_batches):
        _sync_gradients(model, is_last=index == len(batch.micro_batches) - 1)
        indices = loss_indices(micro_batch)
        inputs = model_inputs(micro_batch, indices, padded=model.padded, device=ranks.device)
        scores = model(inputs, entropy=config.needs_entropy)
        if len(indices):
            seen = _loss_inputs(micro_batch, indices, scores, config=config, device=ranks.device)
            token_loss = _call(loss_fn, seen)
            loss = (seen.weights * token_loss.loss).sum()
            checked.append(
                Checked(
                    micro_batch=micro_batch,
                    indices=indices,
                    logprobs=scores.logprobs.detach(),
                    loss=token_loss.loss.detach(),
                )
            )
            _tally(tally, seen, token_loss, micro_batch, indices, config=config, version=version, is_first=is_first)
        else:
            loss = scores.logprobs.sum() * 0.0  # same collectives as the other ranks, no gradient
        (loss * ranks.count).backward()  # FSDP averages over ranks; the weights already make a sum
    _stop_where_not_finite(checked, ranks)


def _sync_gradients(model: PolicyModel, *, is_last: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)


def _loss_inputs(
    micro_batch: MicroBatch, indices: np.ndarray, scores: TokenScores, *, config: LossConfig, device: torch.device
) -> LossInputs:
    def column(values_N: np.ndarray) -> Tensor:
        return torch.from_numpy(values_N[indices]).to(device)

    engine = column(micro_batch.logprobs)
    old = engine
    if config.old_logprobs == "trainer":
        # without a recorded one no step lies between: the policy itself is the old policy
        recorded = micro_batch.old_logprobs
        old = scores.logprobs.detach() if recorded is None else column(recorded)
    return LossInputs(
        logprobs=scores.logprobs,
        old_logprobs=old,
        engine_logprobs=engine,
        advantages=column(micro_batch.advantages),
        weights=column(micro_batch.weights),
        rows=torch.from_numpy(micro_batch.rows_at(indices)).to(device),
        ref_logprobs=None if micro_batch.ref_logprobs is None else column(micro_batch.ref_logprobs),
        entropy=scores.entropy,
    )


def _call(loss_fn: LossFn, inputs: LossInputs) -> TokenLoss:
    token_loss = loss_fn(inputs)
    if not isinstance(token_loss, TokenLoss) or token_loss.loss.shape != inputs.logprobs.shape:
        got = tuple(token_loss.loss.shape) if isinstance(token_loss, TokenLoss) else type(token_loss).__name__
        raise BatchError(
            f"The loss function returned {got}; it must return TokenLoss with one unweighted loss for each of the "
            f"{len(inputs.logprobs)} tokens. The trainer applies the weights, so that every normalisation and every "
            "split into micro-batches stays exact."
        )
    return token_loss


def _tally(
    tally: Tally,
    inputs: LossInputs,
    token_loss: TokenLoss,
    micro_batch: MicroBatch,
    indices: np.ndarray,
    *,
    config: LossConfig,
    version: int,
    is_first: bool,
) -> None:
    tally_loss(tally, inputs, token_loss)
    if config.kind == "sft":
        return  # nothing was sampled: there is no ratio and no engine to differ from
    tally_ratio(tally, inputs)
    if is_first or micro_batch.old_logprobs is not None:
        # later optimizer steps have moved on: compare what the version scored, not what they score
        scored = inputs.logprobs.detach() if is_first else inputs.old_logprobs
        tally_gap(tally, scored, inputs.engine_logprobs, micro_batch.versions[indices], version=version)


def _stop_where_not_finite(checked: Sequence[Checked], ranks: Ranks) -> None:
    flags = [~(seen.logprobs.isfinite() & seen.loss.isfinite()).all() for seen in checked]
    is_bad = bool(torch.stack(flags).any()) if flags else False
    (any_bad,) = ranks.max([float(is_bad)])
    if is_bad:
        raise NumericsError(next(message for seen in checked if (message := _first_bad(seen))))
    if any_bad:
        raise NumericsError("A log-prob or a loss of another rank is not finite; that rank names the sample.")


def _first_bad(seen: Checked) -> str | None:
    for what, values in (("log-prob", seen.logprobs), ("loss", seen.loss)):
        bad = (~values.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            place = seen.micro_batch.where(int(seen.indices[bad[0]]))
            return (
                f"The {what} of {place} is {values[bad[0]].item()} ({len(bad)} of {len(values)} tokens of its "
                "micro-batch). No step was taken. Look at this sample, the learning rate and the loss."
            )
    return None
