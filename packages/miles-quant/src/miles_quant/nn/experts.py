"""Experts that Transformers keeps in two tensors of three dimensions.

gate_up_proj [E, 2 I, H]    in checkpoints: experts.<e>.gate_proj.weight [I, H], experts.<e>.up_proj.weight [I, H]
down_proj    [E, H, I]      in checkpoints: experts.<e>.down_proj.weight [H, I]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import QuantError
from .matmul import Scheme, train_linear


def is_fused_experts(module: nn.Module) -> bool:
    """Does the module hold its experts in the two tensors above?"""
    own = dict(module.named_parameters(recurse=False))
    return {"gate_up_proj", "down_proj"} <= own.keys() and all(own[k].dim() == 3 for k in ("gate_up_proj", "down_proj"))


def check_fused_experts(name: str, module: nn.Module) -> None:
    """Refuse experts that compute something else than `down(act(gate(x)) * up(x))`."""
    others = sorted({key for key, _ in module.named_parameters(recurse=False)} - {"gate_up_proj", "down_proj"})
    if others or not callable(getattr(module, "act_fn", None)) or getattr(module, "is_transposed", False):
        raise QuantError(
            f"{name} ({type(module).__name__}) is not a gated layer of plain experts: it has further parameters "
            f"({', '.join(others) or 'none'}), no `act_fn`, or transposed weights. It cannot be trained in low "
            "precision; keep it with `keep_bf16`."
        )


def expert_matrices(name: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every expert's matrices under their names in checkpoints, as views."""
    for expert in range(module.gate_up_proj.shape[0]):
        for part, matrix in zip(("gate_proj", "up_proj"), module.gate_up_proj[expert].chunk(2), strict=True):
            yield f"{name}.{expert}.{part}.weight", matrix
        yield f"{name}.{expert}.down_proj.weight", module.down_proj[expert]


class QuantExperts(nn.Module):
    """Fused experts whose forward pass computes with quantised values; `prepare_model` mixes it into their class."""

    scheme: Scheme
    is_gate_up_quantized: bool
    is_down_quantized: bool
    act_fn: nn.Module
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    @staticmethod
    def convert(module: nn.Module, scheme: Scheme, *, gate_up: bool, down: bool) -> None:
        """Give the module a class of its own in place."""
        cls = type(module)
        module.__class__ = type(f"Quant{cls.__name__}", (QuantExperts, cls), {})
        prepared: Any = module
        prepared.scheme = scheme
        prepared.is_gate_up_quantized, prepared.is_down_quantized = gate_up, down

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] for tokens [T, H], their experts [T, k] and the weights of these [T, k]."""
        return route(hidden_states, top_k_index, top_k_weights, len(self.gate_up_proj), self._expert)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj[expert].chunk(2)
        if self.is_gate_up_quantized:
            amax = self.scheme.amax(gate, up)
            gate_x, up_x = (train_linear(x, weight, self.scheme, amax=amax) for weight in (gate, up))
        else:
            gate_x, up_x = nn.functional.linear(x, gate), nn.functional.linear(x, up)
        hidden = self.act_fn(gate_x) * up_x
        down = self.down_proj[expert]
        if not self.is_down_quantized:
            return nn.functional.linear(hidden, down)
        return train_linear(hidden, down, self.scheme, amax=self.scheme.amax(down))


def route(
    tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, num_experts: int, expert: Any
) -> torch.Tensor:
    """Each token through its experts, summed by weight; experts that no token chose are not called.

    Args:
        expert: `(number, [t, H]) -> [t, H]`.
    """
    result = torch.zeros_like(tokens)
    for number in range(num_experts):
        rows, slots = torch.where(index == number)
        if len(rows):
            value = expert(number, tokens[rows]) * weights[rows, slots, None]
            result = result.index_add(0, rows, value.to(result.dtype))
    return result
