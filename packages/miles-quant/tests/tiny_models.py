"""Tiny Qwen3 models, dense and with experts, whose every matrix the formats can take."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from miles_quant import Recipe, quantize_shards, round_shards
from miles_quant.nn.prepare import named_matrices
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .conftest import Shard, normal, write_folder

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
KINDS = ("dense", "moe")


def build(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(seed)
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, intermediate_size=256))
    else:
        config = Qwen3MoeConfig(
            **_SHAPE, intermediate_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
        )
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(normal(*parameter.shape, seed=seed * 1000 + i, dtype=torch.float32))
    return model.to(dtype).eval()


def empty_like(model: Any) -> Any:
    """The same architecture with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    return other


def save(model: Any, path: Path) -> Path:
    """The model's folder, experts one by one."""
    tensors = {name: matrix.detach().clone() for name, matrix in named_matrices(model).items()}
    return write_folder(path, tensors, layers=model.config.num_hidden_layers)


def export(model: Any, recipe: Recipe) -> dict[str, torch.Tensor]:
    """What a weight push brings: whole tensors under their stored names."""
    return {shard.name: shard.tensor for shard in quantize_shards(lambda: shards_of(model), recipe)}


def rounded(model: Any, recipe: Recipe) -> dict[str, torch.Tensor]:
    """What a push to an engine without codes brings."""
    return {shard.name: shard.tensor for shard in round_shards(lambda: shards_of(model), recipe)}


def shards_of(model: Any) -> list[Shard]:
    return [
        Shard(name, (*matrix.shape,), str(matrix.dtype), tuple((0, n) for n in matrix.shape), matrix.detach())
        for name, matrix in named_matrices(model).items()
    ]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(seed))
