"""Supervised fine-tuning as a loss like any other."""

from __future__ import annotations

from .inputs import LossInputs, TokenLoss


def sft_loss(inputs: LossInputs) -> TokenLoss:
    """Negative log-likelihood times the sample's weight, which SFT samples carry as their advantage (usually 1)."""
    return TokenLoss(-inputs.logprobs * inputs.advantages, {"loss/nll": -inputs.logprobs.detach()})
