"""Per-token losses: what is minimised on each loss token. Weights are the trainer's business."""

from .inputs import LossFn, LossInputs, TokenLoss
from .kl import kl_estimate
from .policy import policy_loss
from .registry import resolve_loss
from .sft import sft_loss

__all__ = ["LossFn", "LossInputs", "TokenLoss", "kl_estimate", "policy_loss", "resolve_loss", "sft_loss"]
