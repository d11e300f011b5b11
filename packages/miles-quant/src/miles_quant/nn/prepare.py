"""A Hugging Face model made ready to be trained in the format of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import QuantError
from ..recipe.recipe import Recipe, siblings
from .experts import QuantExperts, check_fused_experts, expert_matrices, is_fused_experts
from .linear import QuantLinear
from .matmul import Scheme


def prepare_model(model: nn.Module, recipe: Recipe) -> frozenset[str]:
    """Make the forward pass compute with every matrix that the recipe quantises as the engine will hold it.

    Modules change in place, before the model is sharded; parameters and their names stay. What this changes, the
    converter and the exporter quantise under the same names, because all three ask the same recipe.

    Returns:
        Names in checkpoints of the quantised matrices.

    Raises:
        QuantError: the recipe does not fit the model, or picks a matrix that is neither a Linear's nor an expert's.
    """
    layers = num_layers(model)
    recipe = recipe if layers is None else recipe.for_model(layers)
    matrices = named_matrices(model)
    chosen = recipe.select({name: tuple(matrix.shape) for name, matrix in matrices.items()})
    scheme = scheme_of(recipe)
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            _prepare_experts(name, module, scheme, chosen)
    for name in sorted(chosen):
        owner = _owner(model, name)
        if owner is None:
            continue  # one expert's part of a fused module, done above
        if not isinstance(owner, nn.Linear):
            raise QuantError(
                f"The recipe quantises {name}, which belongs to a {type(owner).__name__}; only linear layers and fused "
                "experts can be trained in low precision. Keep it with `keep_bf16`."
            )
        fused = [_owner(model, other) for other in siblings(name) if other != name and other in chosen]
        QuantLinear.convert(owner, scheme, fused=[linear for linear in fused if isinstance(linear, nn.Linear)])
    return chosen


def scheme_of(recipe: Recipe) -> Scheme:
    """The formats of both operands that a recipe asks for."""
    activation = recipe.spec.activation if recipe.quantize_activations else None
    return Scheme(weight=recipe.spec, activation=activation, source_dtype=getattr(torch, recipe.source_dtype))


def named_matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters under their names in checkpoints: fused experts as one matrix an expert."""
    fused = {name: module for name, module in model.named_modules() if is_fused_experts(module)}
    inside = {f"{name}.{part}" for name in fused for part in ("gate_up_proj", "down_proj")}
    named: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if n not in inside}
    for name, module in fused.items():
        named |= dict(expert_matrices(name, module))
    return named


def num_layers(model: nn.Module) -> int | None:
    """What the model's configuration says, of the language model where there are several."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    return getattr(text, "num_hidden_layers", None)


def _prepare_experts(name: str, module: nn.Module, scheme: Scheme, chosen: frozenset[str]) -> None:
    parts: Mapping[str, list[bool]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for matrix, _ in expert_matrices(name, module):
        parts[matrix.split(".")[-2]].append(matrix in chosen)
    for part, picked in parts.items():
        if any(picked) != all(picked):
            raise QuantError(
                f"The recipe quantises {part} of {sum(picked)} of {len(picked)} experts of {name}, which engines hold "
                "in one tensor. Keep all of them or none."
            )
    gate_up, down = all(parts["gate_proj"]), all(parts["down_proj"])
    if gate_up or down:
        check_fused_experts(name, module)
        QuantExperts.convert(module, scheme, gate_up=gate_up, down=down)


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The module whose parameter `weight` this is; None for a part of fused experts."""
    try:
        return model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:
        return None
