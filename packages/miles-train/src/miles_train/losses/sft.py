"""Supervised fine-tuning as a loss like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .inputs import LossFn, LossInputs, TokenLoss
from .settings import LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoss(LossSettings):
    """Imitate demonstrations: negative log-likelihood of their loss tokens."""

    is_sampled: ClassVar[bool] = False

    kind: Literal["sft"] = "sft"

    def function(self) -> LossFn:
        return sft_loss


def sft_loss(inputs: LossInputs) -> TokenLoss:
    """Negative log-likelihood times the sample's weight, which SFT samples carry as their advantage (usually 1)."""
    return TokenLoss(-inputs.logprobs * inputs.advantages, {"loss/nll": -inputs.logprobs.detach()})
