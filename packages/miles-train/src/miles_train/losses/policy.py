"""The clipped policy-gradient loss and its usual companions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from miles_tito.shared.settings import SettingError, require

from .inputs import LossFn, LossInputs, TokenLoss
from .kl import MAX_LOG_RATIO, kl_estimate
from .settings import LossSettings, Need

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(LossSettings):
    """The clipped policy gradient (`policy_loss`), with a KL term and an entropy bonus where they are asked for."""

    kind: Literal["policy"] = "policy"
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low (PPO, arXiv:1707.06347)."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high. 0.28 follows DAPO, arXiv:2503.14476 §3.1."""
    dual_clip: float | None = None
    """For negative advantages the loss is at most `dual_clip · |advantage|` (arXiv:1912.09729); e.g. 3.0."""
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """The denominator of the ratio: what the engine recorded, or this trainer's own before its first step."""
    tis_cap: float | None = None
    """Truncated importance sampling: weigh tokens by min(p_trainer / p_engine, cap). Needs
    `old_logprobs = "trainer"`."""
    kl_coef: float = 0.0
    """Weight of the KL term to the frozen initial model; above 0 a second copy of the model is held."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators. As a *loss* only k2 has the gradient of KL(policy ‖ reference); that of k1 is zero on
    average."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        require(0 < self.clip_low < 1, "clip_low", self.clip_low, "between 0 and 1")
        require(self.clip_high > 0, "clip_high", self.clip_high, "above 0")
        require(
            self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
            "dual_clip",
            self.dual_clip,
            f"above 1 + clip_high = {1 + self.clip_high:g}",
        )
        require(self.old_logprobs in ("engine", "trainer"), "old_logprobs", self.old_logprobs, "engine or trainer")
        require(self.tis_cap is None or self.tis_cap > 0, "tis_cap", self.tis_cap, "above 0")
        if self.tis_cap is not None and self.old_logprobs != "trainer":
            raise SettingError(
                f'`tis_cap` is {self.tis_cap} but `old_logprobs` is "engine": the ratio then already starts from the '
                'engine and the cap has no effect. Set old_logprobs = "trainer", or remove tis_cap.'
            )
        require(self.kl_coef >= 0, "kl_coef", self.kl_coef, "0 or more")
        require(self.kl_estimator in ("k1", "k2", "k3"), "kl_estimator", self.kl_estimator, "k1, k2 or k3")
        require(math.isfinite(self.entropy_coef), "entropy_coef", self.entropy_coef, "finite")

    @property
    def needs(self) -> frozenset[Need]:
        wanted: dict[Need, bool] = {
            "reference": self.kl_coef > 0,
            "entropy": self.entropy_coef != 0,
            "old_logprobs": self.old_logprobs == "trainer",
        }
        return frozenset(name for name, is_needed in wanted.items() if is_needed)

    def function(self) -> LossFn:
        return partial(
            policy_loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            tis_cap=self.tis_cap,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
        )


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
    loss = unclipped.maximum(clipped)
    metrics: dict[str, Tensor] = {"ratio/clip_fraction": (clipped > unclipped).float()}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = bound.where(bounded, loss)
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
