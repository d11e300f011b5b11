"""Per-token losses: what is minimised on each loss token. Weights are the trainer's business."""

from .custom import CustomLoss
from .inputs import LossFn, LossInputs, TokenLoss
from .kl import kl_estimate
from .policy import PolicyLoss, policy_loss
from .registry import AnyLoss, LossConfig, resolve_loss
from .settings import LossSettings, needs
from .sft import SftLoss, sft_loss

__all__ = [
    "AnyLoss",
    "CustomLoss",
    "LossConfig",
    "LossFn",
    "LossInputs",
    "LossSettings",
    "PolicyLoss",
    "SftLoss",
    "TokenLoss",
    "kl_estimate",
    "needs",
    "policy_loss",
    "resolve_loss",
    "sft_loss",
]
