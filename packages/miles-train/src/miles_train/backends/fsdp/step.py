"""Forward and backward passes of the sharded model over the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from miles_train.batch import Batch, MicroBatch
from miles_train.ranks import Ranks
from miles_train.step.inputs import loss_indices, model_inputs
from miles_train.step.objective import Objective

from .model import PolicyModel


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


def accumulate(model: PolicyModel, batch: Batch, objective: Objective, *, entropy: bool, ranks: Ranks) -> None:
    """Leave the gradient of the whole batch in the parameters, reduced over ranks in the last micro-batch only.

    Raises:
        NumericsError: on every rank, when a log-prob or a loss of any rank is not finite.
    """
    for index, micro_batch in enumerate(batch.micro_batches):
        _sync_gradients(model, is_last=index == len(batch.micro_batches) - 1)
        indices = loss_indices(micro_batch)
        scores = model(model_inputs(micro_batch, indices, padded=model.padded, device=ranks.device), entropy=entropy)
        loss = objective.loss(micro_batch, indices, scores)
        (loss * ranks.count).backward()  # FSDP averages over ranks; the weights already make a sum
    objective.require_finite(ranks)


def _sync_gradients(model: PolicyModel, *, is_last: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
