"""The loss side of one optimizer step: from the scores of each micro-batch to what is differentiated and reported.

Subscripts: M loss tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles_train.batch import MicroBatch
from miles_train.errors import BatchError, NumericsError
from miles_train.logprobs import TokenScores
from miles_train.losses import AnyLoss, LossFn, LossInputs, TokenLoss
from miles_train.metrics import Tally, tally_gap, tally_loss, tally_ratio
from miles_train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What one micro-batch came to, looked at when all gradients are there: ranks stop together."""

    micro_batch: MicroBatch
    indices: np.ndarray
    logprobs: Tensor
    """[M]."""
    loss: Tensor
    """[M]."""


class Objective:
    """What one optimizer step minimises; a backend makes one a step and calls `loss` for each of its micro-batches.

    for micro_batch in batch.micro_batches:
        indices = loss_indices(micro_batch)
        scores = model(model_inputs(micro_batch, indices, …), entropy=settings.needs_entropy)
        objective.loss(micro_batch, indices, scores).backward()
    objective.require_finite(ranks)
    """

    def __init__(
        self,
        settings: AnyLoss,
        loss_fn: LossFn,
        *,
        device: torch.device,
        tally: Tally,
        version: int,
        is_first: bool,
    ) -> None:
        """
        Args:
            version: of the weights before the first optimizer step of this batch of episodes.
            is_first: no optimizer step has been taken since.
        """
        self._needs = settings.needs
        self._is_sampled = settings.is_sampled
        self._loss_fn = loss_fn
        self._device = device
        self._tally = tally
        self._version = version
        self._is_first = is_first
        self._seen: list[_Seen] = []

    def loss(self, micro_batch: MicroBatch, indices: np.ndarray, scores: TokenScores) -> Tensor:
        """The micro-batch's share of the batch's loss, a scalar; over all micro-batches and ranks the shares add up.

        Args:
            indices: [M] packed indices of its loss tokens; without any, the same graph with a gradient of zero.
            scores: of these tokens.
        """
        if not len(indices):
            return scores.logprobs.sum() * 0.0  # same collectives as the other ranks, no gradient
        inputs = self._inputs(micro_batch, indices, scores)
        token_loss = _call(self._loss_fn, inputs)
        self._seen.append(
            _Seen(
                micro_batch=micro_batch,
                indices=indices,
                logprobs=scores.logprobs.detach(),
                loss=token_loss.loss.detach(),
            )
        )
        self._report(inputs, token_loss, micro_batch, indices)
        return (inputs.weights * token_loss.loss).sum()

    def require_finite(self, ranks: Ranks) -> None:
        """After the last micro-batch. Collective.

        Raises:
            NumericsError: on every rank, when a log-prob or a loss of any rank is not finite.
        """
        flags = [~(seen.logprobs.isfinite() & seen.loss.isfinite()).all() for seen in self._seen]
        is_bad = bool(torch.stack(flags).any()) if flags else False
        (any_bad,) = ranks.max([float(is_bad)])
        if is_bad:
            raise NumericsError(next(message for seen in self._seen if (message := _first_bad(seen))))
        if any_bad:
            raise NumericsError("A log-prob or a loss of another rank is not finite; that rank names the sample.")

    def _inputs(self, micro_batch: MicroBatch, indices: np.ndarray, scores: TokenScores) -> LossInputs:
        def column(values_N: np.ndarray) -> Tensor:
            return torch.from_numpy(values_N[indices]).to(self._device)

        engine = column(micro_batch.logprobs)
        old = engine
        if "old_logprobs" in self._needs:
            # without a recorded one no step lies between: the policy itself is the old policy
            recorded = micro_batch.old_logprobs
            old = scores.logprobs.detach() if recorded is None else column(recorded)
        return LossInputs(
            logprobs=scores.logprobs,
            old_logprobs=old,
            engine_logprobs=engine,
            advantages=column(micro_batch.advantages),
            weights=column(micro_batch.weights),
            rows=torch.from_numpy(micro_batch.rows_at(indices)).to(self._device),
            ref_logprobs=None if micro_batch.ref_logprobs is None else column(micro_batch.ref_logprobs),
            entropy=scores.entropy,
        )

    def _report(self, inputs: LossInputs, token_loss: TokenLoss, micro_batch: MicroBatch, indices: np.ndarray) -> None:
        tally_loss(self._tally, inputs, token_loss)
        if not self._is_sampled:
            return  # there is no ratio and no engine to differ from
        tally_ratio(self._tally, inputs)
        if self._is_first or micro_batch.old_logprobs is not None:
            # later optimizer steps have moved on: compare what the version scored, not what they score
            scored = inputs.logprobs.detach() if self._is_first else inputs.old_logprobs
            versions = micro_batch.versions[indices]
            tally_gap(self._tally, scored, inputs.engine_logprobs, versions, version=self._version)


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


def _first_bad(seen: _Seen) -> str | None:
    for what, values in (("log-prob", seen.logprobs), ("loss", seen.loss)):
        bad = (~values.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            place = seen.micro_batch.where(int(seen.indices[bad[0]]))
            return (
                f"The {what} of {place} is {values[bad[0]].item()} ({len(bad)} of {len(values)} tokens of its "
                "micro-batch). No step was taken. Look at this sample, the learning rate and the loss."
            )
    return None
