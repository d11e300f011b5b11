"""Settings of training. Importable without torch; checked when built, never changed afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_tito.shared.plugins import check_name
from miles_tito.shared.settings import SettingError, require

from .backends import BACKENDS
from .backends.fsdp import FSDPConfig
from .losses.policy import PolicyLoss
from .losses.registry import AnyLoss


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
        require(math.isfinite(self.lr) and self.lr >= 0, "lr", self.lr, "0 or more")
        require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers in [0, 1)"
        )
        require(self.eps > 0, "eps", self.eps, "above 0")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        require(
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
        require(self.kind in ("constant", "linear", "cosine"), "kind", self.kind, "constant, linear or cosine")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        if self.total_steps is not None:
            require(
                self.total_steps > self.warmup_steps,
                "total_steps",
                self.total_steps,
                f"above `warmup_steps` = {self.warmup_steps}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One trainer: its ranks, its precision, its optimizer and its loss."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    backend: str = "fsdp"
    """`fsdp`, or `package.module:factory` of your own: `factory(model_path, rank=…, init_method=…, **backend_args)`."""
    backend_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of a factory of your own; a built-in backend has a table under its name."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    ranks: int = 1
    """Processes that share the model."""
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
    loss: AnyLoss = field(default_factory=PolicyLoss)
    logit_chunk_mb: int = 256
    """Most memory of one chunk of float32 logits."""
    threads: int | None = None
    """CPU threads of torch on each rank; none leaves torch's own choice."""
    collective_timeout_s: float = 600.0
    """A collective that some rank never joins fails after this instead of hanging."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_name(self.backend, BACKENDS, kind="trainer backend", key="backend")
        if self.backend in BACKENDS and self.backend_args:
            raise SettingError(
                f'`backend_args` is {dict(self.backend_args)} but `backend` is "{self.backend}", which takes its '
                f"settings from `train.{self.backend}`. Move them there, or name a factory of your own."
            )
        if self.backend != "fsdp" and self.fsdp != FSDPConfig():
            raise SettingError(
                f'`fsdp` is {self.fsdp} but `backend` is "{self.backend}", which does not read it. Remove `train.fsdp`.'
            )
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        for name in ("dtype", "master_dtype"):
            require(getattr(self, name) in ("float32", "bfloat16"), name, getattr(self, name), "float32 or bfloat16")
        for name in ("ranks", "minibatches", "logit_chunk_mb"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.token_budget >= 2, "token_budget", self.token_budget, "at least 2")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1, or none")
        require(self.collective_timeout_s > 0, "collective_timeout_s", self.collective_timeout_s, "above 0")
        if self.master_dtype == "bfloat16" and self.dtype == "float32":
            raise SettingError(
                '`master_dtype` is "bfloat16" but `dtype` is "float32": the optimizer would round away what the '
                'forward pass computes. Use master_dtype = "float32".'
            )
