"""What a loss sees and what it gives back. Only loss tokens are here: masked positions never reach a loss.

Subscripts: M loss tokens of a micro-batch, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss gets: the loss tokens of one micro-batch. Only `logprobs` and `entropy` carry a gradient."""

    logprobs: Tensor
    """[M] float32, the policy being trained."""
    old_logprobs: Tensor
    """[M] float32, denominator of the ratio: the engine's, or the trainer's before its first step."""
    engine_logprobs: Tensor
    """[M] float32, as recorded when the token was sampled."""
    advantages: Tensor
    """[M] float32."""
    weights: Tensor
    """[M] float32, share of the token in the loss of the whole batch. The trainer applies them: do not."""
    rows: Tensor
    """[M] int64, row of the micro-batch that the token belongs to, for losses over whole sequences."""
    ref_logprobs: Tensor | None = None
    """[M] float32, the frozen reference, None unless the loss needs it."""
    entropy: Tensor | None = None
    """[M] float32, None unless measured."""


class TokenLoss(NamedTuple):
    """What a loss returns."""

    loss: Tensor
    """[M] loss of each token, unweighted."""
    metrics: Mapping[str, Tensor] = {}
    """[M] tensors by name (`loss/policy`, `ratio/clip_fraction`); logged as their mean over loss tokens."""


LossFn = Callable[[LossInputs], TokenLoss]
