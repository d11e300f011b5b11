"""Settings of training. Importable without torch; checked when built, never changed afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from .errors import ConfigError

BUILTIN_LOSSES = ("policy", "sft")

Normalization = Literal["episode", "token", "dr_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) on float32 or bfloat16 parameters."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    lr: float = 1e-6
    """Peak learning rate; the schedule multiplies it."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases are never decayed."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; none for no clipping."""
    skip_nonfinite: bool = False
    """Leave the weights alone when the gradient norm is not finite, and count it, instead of stopping."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.lr) and self.lr >= 0, "lr", self.lr, "0 or more")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)"
        )
        _require(self.eps > 0, "eps", self.eps, "above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "max_grad_norm",
            self.max_grad_norm,
            "above 0, or none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes over optimizer steps."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Steps of linear growth; the first step already has `lr / warmup_steps`."""
    total_steps: int | None = None
    """Optimizer steps until the end of the decay; needed for linear and cosine."""
    min_lr_ratio: float = 0.0
    """Fraction of `lr` that the decay ends at."""

    def __post_init__(self) -> None:
        _require(self.kind in ("constant", "linear", "cosine"), "kind", self.kind, "constant, linear or cosine")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        if self.total_steps is not None:
            _require(
                self.total_steps > self.warmup_steps,
                "total_steps",
                self.total_steps,
                f"above `warmup_steps` = {self.warmup_steps}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What is minimised on each token, and how tokens are averaged."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: str = "policy"
    """`policy`, `sft`, or `package.module:function` of your own that takes `LossInputs` and returns `TokenLoss`."""
    normalization: Normalization = "episode"
    """`episode`: mean over episodes of the mean over the episode's loss tokens (each episode weighs the same).
    `token`: mean over all loss tokens of the batch (long episodes weigh more). `dr_grpo`: sum divided by
    `max_tokens` for each episode (arXiv:2503.20783)."""
    max_tokens: int | None = None
    """The constant of `dr_grpo`: the largest number of tokens that an episode may generate."""
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
    log_entropy: bool = True
    """Measure the policy's entropy (one more pass over each chunk of logits)."""

    def __post_init__(self) -> None:
        _require(
            self.kind in BUILTIN_LOSSES or ":" in self.kind,
            "kind",
            self.kind,
            f"one of {', '.join(BUILTIN_LOSSES)}, or `package.module:function`",
        )
        _require(
            self.normalization in ("episode", "token", "dr_grpo"),
            "normalization",
            self.normalization,
            "episode, token or dr_grpo",
        )
        if self.normalization == "dr_grpo":
            _require(self.max_tokens is not None, "max_tokens", None, "set when `normalization` is dr_grpo")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 < self.clip_low < 1, "clip_low", self.clip_low, "between 0 and 1")
        _require(self.clip_high > 0, "clip_high", self.clip_high, "above 0")
        _require(
            self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
            "dual_clip",
            self.dual_clip,
            f"above 1 + clip_high = {1 + self.clip_high:g}",
        )
        _require(self.old_logprobs in ("engine", "trainer"), "old_logprobs", self.old_logprobs, "engine or trainer")
        _require(self.tis_cap is None or self.tis_cap > 0, "tis_cap", self.tis_cap, "above 0")
        if self.tis_cap is not None and self.old_logprobs != "trainer":
            raise ConfigError(
                f'`tis_cap` is {self.tis_cap} but `old_logprobs` is "engine": the ratio then already starts from the '
                'engine and the cap has no effect. Set old_logprobs = "trainer", or remove tis_cap.'
            )
        _require(self.kl_coef >= 0, "kl_coef", self.kl_coef, "0 or more")
        _require(self.kl_estimator in ("k1", "k2", "k3"), "kl_estimator", self.kl_estimator, "k1, k2 or k3")
        _require(math.isfinite(self.entropy_coef), "entropy_coef", self.entropy_coef, "finite")
        if self.kind == "sft" and (self.kl_coef or self.entropy_coef or self.tis_cap or self.dual_clip):
            raise ConfigError(
                "`kl_coef`, `entropy_coef`, `tis_cap` and `dual_clip` belong to the policy loss and have no effect "
                'with kind = "sft". Remove them.'
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        return self.log_entropy or self.entropy_coef != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One trainer: its ranks, its precision, its optimizer and its loss."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    backend: Literal["fsdp"] = "fsdp"
    ranks: int = 1
    """Processes that share the model (FSDP2 shards over all of them)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where torch sees one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the forward pass computes in, and what shards and exports carry."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the optimizer updates; never narrower than `dtype`."""
    token_budget: int = 8192
    """Most tokens of one micro-batch; a single sample must fit."""
    minibatches: int = 1
    """Optimizer steps over one batch of episodes; above 1 the later ones are off-policy and rely on clipping."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    layout: Literal["auto", "packed", "padded"] = "auto"
    """How rows reach the model: one packed row (no padding outside attention), or a right-padded matrix for
    models whose attention cannot be replaced. `auto` packs where the model allows it."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    reshard_after_forward: bool = True
    """Free each layer's gathered weights after its forward pass (several ranks only): less memory, one more gather."""
    logit_chunk_mb: int = 256
    """Most memory of one chunk of float32 logits."""
    threads: int | None = None
    """CPU threads of torch on each rank; none leaves torch's own choice."""
    collective_timeout_s: float = 600.0
    """A collective that some rank never joins fails after this instead of hanging."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.backend == "fsdp", "backend", self.backend, "fsdp")
        _require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        _require(self.layout in ("auto", "packed", "padded"), "layout", self.layout, "auto, packed or padded")
        for name in ("dtype", "master_dtype"):
            _require(getattr(self, name) in ("float32", "bfloat16"), name, getattr(self, name), "float32 or bfloat16")
        for name in ("ranks", "minibatches", "logit_chunk_mb"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.token_budget >= 2, "token_budget", self.token_budget, "at least 2")
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1, or none")
        _require(self.collective_timeout_s > 0, "collective_timeout_s", self.collective_timeout_s, "above 0")
        if self.master_dtype == "bfloat16" and self.dtype == "float32":
            raise ConfigError(
                '`master_dtype` is "bfloat16" but `dtype` is "float32": the optimizer would round away what the '
                'forward pass computes. Use master_dtype = "float32".'
            )


def _require(fact: bool, name: str, value: object, wanted: str) -> None:
    if not fact:
        raise ConfigError(f"`{name}` is {value!r}; it must be {wanted}.")
