"""A reference engine: a model whose quantised layers hold nothing but the bytes of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.folder import ModelFolder
from ..errors import ModelFolderError
from ..formats.spec import QuantizedTensor
from .experts import check_fused_experts, is_fused_experts, route
from .matmul import Scheme, packed_linear
from .prepare import named_matrices, scheme_of


class PackedLinear(nn.Module):
    """A linear layer that holds codes and scales alone, as buffers under their names in checkpoints.

    `load_packed` puts it in the place of each quantised Linear.
    """

    def __init__(self, stored: dict[str, torch.Tensor], scheme: Scheme, *, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.scheme = scheme
        self._suffixes = tuple(stored)
        for suffix, tensor in stored.items():
            self.register_buffer(suffix, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed(self) -> QuantizedTensor:
        return self.scheme.weight.restore({suffix: self.get_buffer(suffix) for suffix in self._suffixes})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = packed_linear(x, self.packed, self.scheme)
        return y if self.bias is None else y + self.bias


class PackedExperts(nn.Module):
    """Experts as single layers, quantised or not, under their names in checkpoints; made by `load_packed`."""

    def __init__(self, experts: list[dict[str, nn.Module]], act_fn: Any) -> None:
        super().__init__()
        for number, parts in enumerate(experts):
            self.add_module(str(number), nn.ModuleDict(parts))
        self.num_experts = len(experts)
        self.act_fn = act_fn

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return route(hidden_states, index, weights, self.num_experts, self._expert)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        expert: Any = self.get_submodule(str(number))
        return expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))


def load_packed(model: nn.Module, folder: str | Path) -> nn.Module:
    """Fill a model of the folder's architecture with the folder's tensors, quantised layers with their bytes alone.

    Args:
        model: built from the folder's configuration; its weights are overwritten.

    Raises:
        ModelFolderError: the folder is not quantised, or its tensors are not the model's.
    """
    source = ModelFolder(folder)
    recipe, quantized = source.recipe, source.quantized
    if recipe is None:
        raise ModelFolderError(f"{folder} is not quantised; load it as any model.")
    scheme, matrices = scheme_of(recipe), named_matrices(model)
    for name in source.infos:
        if name in matrices and name not in quantized:
            with torch.no_grad():
                matrices[name].copy_(source.read(name))
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    absent = sorted(set(matrices) - set(source.infos) - quantized - tied)
    if absent or not quantized <= set(matrices):
        extra = sorted(quantized - set(matrices))
        raise ModelFolderError(f"{folder} is of another model: it lacks {absent[:3]} and brings {extra[:3]}.")
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            check_fused_experts(name, module)
            _replace(model, name, _packed_experts(name, module, source, scheme))
        elif isinstance(module, nn.Linear) and f"{name}.weight" in quantized:
            _replace(model, name, _packed_linear(f"{name}.weight", source, scheme, module.bias))
    return model


def _packed_linear(name: str, source: ModelFolder, scheme: Scheme, bias: torch.Tensor | None) -> PackedLinear:
    return PackedLinear(source.read_stored(name), scheme, bias=None if bias is None else bias.detach())


def _packed_experts(name: str, module: Any, source: ModelFolder, scheme: Scheme) -> PackedExperts:
    def layer(matrix: str, value: torch.Tensor) -> nn.Module:
        if matrix in source.quantized:
            return _packed_linear(matrix, source, scheme, None)
        linear = nn.Linear(value.shape[1], value.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(value.detach().clone(), requires_grad=False)
        return linear

    experts: list[dict[str, nn.Module]] = []
    for number in range(module.gate_up_proj.shape[0]):
        gate, up = module.gate_up_proj[number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj[number]}
        experts.append({part: layer(f"{name}.{number}.{part}.weight", value) for part, value in parts.items()})
    return PackedExperts(experts, module.act_fn)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
