"""The clipped policy-gradient loss and its usual companions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .inputs import LossInputs, TokenLoss
from .kl import MAX_LOG_RATIO, kl_estimate


def policy_loss(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    tis_cap: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: Literal["k1", "k2", "k3"] = "k3",
    entropy_coef: float = 0.0,
) -> TokenLoss:
    """max(-r A, -clip(r, 1 - low, 1 + high) A), with r = p / p_old.

    Clipping is PPO's (arXiv:1707.06347), its wider upper side DAPO's "clip-higher" (arXiv:2503.14476), the bound
    for negative advantages dual-clip PPO's (arXiv:1912.09729). `tis_cap` weighs each token by
    min(p_old / p_engine, cap): importance sampling truncated as in Ionides, J. Comput. Graph. Stat. 17(2), 2008,
    for the gap between the trainer's and the engine's numerics (F. Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025); the two-policy form is that of arXiv:2110.00641.
    """
    ratio = importance_ratio(inputs.logprobs, inputs.old_logprobs)
    advantages = inputs.advantages
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    metrics: dict[str, Tensor] = {"ratio/clip_fraction": (clipped > unclipped).float()}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["ratio/dual_clip_fraction"] = bounded.float()
    if tis_cap is not None:
        correction = importance_ratio(inputs.old_logprobs, inputs.engine_logprobs).detach()
        loss = loss * correction.clamp(max=tis_cap)
        metrics["ratio/tis_weight"] = correction.clamp(max=tis_cap)
        metrics["ratio/tis_truncated_fraction"] = (correction > tis_cap).float()
    metrics["loss/policy"] = loss.detach()
    if kl_coef > 0:
        assert inputs.ref_logprobs is not None, "a KL term needs reference log-probs"
        kl = kl_estimate(inputs.logprobs, inputs.ref_logprobs, estimator=kl_estimator)
        loss = loss + kl_coef * kl
        metrics["loss/kl"] = kl.detach()
    if entropy_coef:
        assert inputs.entropy is not None, "an entropy bonus needs the entropy"
        loss = loss - entropy_coef * inputs.entropy
    return TokenLoss(loss, metrics)


def importance_ratio(logprobs_M: Tensor, old_logprobs_M: Tensor) -> Tensor:
    """p / p_old, bounded far outside any clip so that it stays finite."""
    return (logprobs_M - old_logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
