"""Golden vectors, shards and small model folders that the tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from miles_quant.checkpoints.safetensors import TensorInfo, TensorWriter

GOLDEN = Path(__file__).parents[4] / "shared" / "data" / "golden" / "quant.npz"

FORMATS = (
    "fp8_tensor/div",
    "fp8_row/miles",
    "fp8_1x128/te",
    "fp8_128x128/div",
    "fp8_128x128/te_pow2",
    "mxfp8/rceil",
    "mxfp8/floor",
    "mxfp4/even",
    "nvfp4/te",
    "nvfp4/te_row",
    "nvfp4/te_4o6_MSE",
    "nvfp4/modelopt",
    "nvfp4/torchao2",
    "nvfp4/1level",
    "int4_g32/miles",
    "int4_g128/ct",
)
"""One of every kind."""


class Shard(NamedTuple):
    """What a trainer hands over: matched by structure."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor


@pytest.fixture
def golden() -> Path:
    if not GOLDEN.exists():
        pytest.skip("golden vectors are not beside this checkout")
    return GOLDEN


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Weights with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 0.05
    outlier = torch.rand(shape, generator=generator) > 0.995
    return torch.where(outlier, values * 20, values).to(dtype)


def small_model(layers: int = 2, *, experts: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Tensors of a decoder under the names of Qwen3, K = 256."""
    shapes = {"model.embed_tokens.weight": (64, 256), "lm_head.weight": (64, 256), "model.norm.weight": (256,)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.self_attn.{p}_proj.weight": (128, 256) for p in "qkv"}
        shapes |= {f"{base}.self_attn.o_proj.weight": (256, 128), f"{base}.input_layernorm.weight": (256,)}
        mlps = [f"{base}.mlp.experts.{i}" for i in range(experts)] or [f"{base}.mlp"]
        shapes |= {f"{base}.mlp.gate.weight": (experts, 256)} if experts else {}
        for mlp in mlps:
            shapes |= {f"{mlp}.{p}_proj.weight": (128, 256) for p in ("gate", "up")}
            shapes |= {f"{mlp}.down_proj.weight": (256, 128)}
    return {name: normal(*shape, seed=seed, dtype=dtype) for seed, (name, shape) in enumerate(shapes.items())}


def write_folder(path: Path, tensors: dict[str, torch.Tensor], *, files: int = 1, layers: int = 2) -> Path:
    """A Hugging Face folder with the tensors dealt over so many files."""
    path.mkdir(parents=True)
    names = (
        [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)] if files > 1 else ["model.safetensors"]
    )
    weight_map = {tensor: names[i % files] for i, tensor in enumerate(tensors)}
    for file in names:
        infos = {
            name: TensorInfo(dtype=tensors[name].dtype, shape=tuple(tensors[name].shape))
            for name, home in weight_map.items()
            if home == file
        }
        with TensorWriter(path / file, infos, {}) as writer:
            for name in infos:
                writer.write(name, tensors[name])
    if files > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers}))
    (path / "tokenizer.json").write_text("{}")
    return path
