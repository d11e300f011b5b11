"""AdamW over local shards: state, gradient norm across ranks, learning rate by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from miles_train.errors import NumericsError
from miles_train.ranks import Ranks
from miles_train.schedule import check_schedule, lr_factor

if TYPE_CHECKING:
    from miles_train.config import OptimizerConfig, ScheduleConfig

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over the shards of this rank: `FSDPTrainer` calls `step` once the gradients of a batch are there."""

    def __init__(self, model: nn.Module, *, config: OptimizerConfig, schedule: ScheduleConfig, ranks: Ranks) -> None:
        check_schedule(schedule)
        self.num_steps = 0
        self._config = config
        self._schedule = schedule
        self._ranks = ranks
        self._names = {id(p): name for name, p in model.named_parameters()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for parameter in parameters:
            self._init_state(parameter)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._config.lr * lr_factor(self.num_steps, self._schedule)

    def step(self) -> dict[str, float]:
        """Clip, update, drop the gradients.

        Raises:
            NumericsError: the gradient norm is not finite; the weights are unchanged and the gradients dropped.
        """
        norm = self._grad_norm()
        metrics = {"optimizer/grad_norm": norm, "optimizer/lr": self.lr, "optimizer/skipped": 0.0}
        if math.isfinite(norm):
            self._update(norm)
        else:
            metrics["optimizer/skipped"] = 1.0
        self.zero_grad()
        if metrics["optimizer/skipped"] and not self._config.skip_nonfinite:
            raise NumericsError(
                f"The gradient norm of optimizer step {self.num_steps + 1} is {norm}; the weights were left as they "
                "were. Lower the learning rate, look at the largest ratio and advantage of this step, or set "
                "`optimizer.skip_nonfinite = true` to go on without such steps."
            )
        self.num_steps += 1
        return metrics

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every state tensor by parameter name."""
        for parameter in self._parameters():
            for key in STATE_NAMES:
                yield f"{self._names[id(parameter)]}.{key}", self.adamw.state[parameter][key]

    def move_state(self, device: torch.device) -> None:
        """Moments to a device (to the host for sleep, and back)."""
        for parameter in self._parameters():
            state = self.adamw.state[parameter]
            for key in STATE_NAMES:
                state[key] = state[key].to(device)

    def _parameters(self) -> Iterator[Any]:
        for group in self.adamw.param_groups:
            yield from group["params"]

    def _init_state(self, parameter: Tensor) -> None:
        """As AdamW's own first step does, so that a checkpoint can be loaded before it."""
        self.adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def _grad_norm(self) -> float:
        """Norm of the whole gradient. FSDP shards every parameter, so squares simply add up over ranks."""
        grads = _local_grads(self._parameters())
        norm = get_total_norm(grads).to(self._ranks.device, torch.float64)
        return math.sqrt(self._ranks.sum_(norm.square()).item())

    def _update(self, norm: float) -> None:
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for grad in _local_grads(self._parameters()):
                grad.mul_(limit / norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [grad for p in parameters if p.grad is not None and (grad := local(p.grad)).numel()]
