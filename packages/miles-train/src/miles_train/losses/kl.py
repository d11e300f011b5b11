"""Estimators of KL(policy ‖ reference) on sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond e^20 an exponential says nothing more, and overflows soon after."""


def kl_estimate(logprobs_M: Tensor, ref_logprobs_M: Tensor, *, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate with its gradient (J. Schulman, "Approximating KL Divergence", 2020).

    With d = log p_ref - log p: k1 = -d is unbiased and noisy, k2 = d²/2 is biased with the right gradient,
    k3 = e^d - 1 - d is unbiased and never negative.
    """
    d = ref_logprobs_M - logprobs_M
    match estimator:
        case "k1":
            return -d
        case "k2":
            return 0.5 * d.square()
        case "k3":
            d = d.clamp(max=MAX_LOG_RATIO)
            return d.expm1() - d
