"""Two FSDP ranks train in low precision; what they send to an engine is what they computed with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from miles_quant import Recipe, convert, differing, load_packed
from miles_quant.checkpoints.folder import ModelFolder
from transformers import (  # fmt: skip
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .low_precision_worker import RANKS, samples

WORKER = Path(__file__).with_name("low_precision_worker.py")
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


def save_model(path: Path, *, experts: bool) -> Path:
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    else:
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("format", "experts"), [("mxfp8", False), ("nvfp4", True)])
def test_two_ranks_send_the_bytes_that_they_computed_with(format: str, experts: bool, tmp_path: Path):
    model = save_model(tmp_path / "model", experts=experts)
    command = [sys.executable, str(WORKER), str(model), str(tmp_path), format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]

    sent: dict[str, torch.Tensor] = {}
    for name, shape, dtype, box, tensor in (shard for rank in ranks for shard in rank["shards"]):
        whole = sent.setdefault(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
        place = tuple(slice(*interval) for interval in box)
        if tensor.dtype.itemsize == 1:
            whole.view(torch.uint8)[place] = tensor.view(torch.uint8)
        else:
            whole[place] = tensor
    assert differing([digest for rank in ranks for digest in rank["digests"]], sent) == []

    recipe = Recipe(format=format)
    convert(tmp_path / "trained", tmp_path / "packed", recipe, is_quiet=True)
    packed = ModelFolder(tmp_path / "packed")
    for name in packed.infos:
        if name != "lm_head.weight":
            assert torch.equal(
                packed.read(name).reshape(-1).view(torch.uint8), sent[name].reshape(-1).view(torch.uint8)
            )

    engine = load_packed(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), packed.path).eval()
    assert json.loads((packed.path / "config.json").read_text())["quantization_config"]
    for sample in samples():
        tokens = torch.tensor(sample.tokens).long()
        with torch.no_grad():
            logprobs = engine(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        wanted = logprobs[torch.tensor(sample.loss_mask[1:])]
        assert any(holds(rank["scored"], wanted) for rank in ranks)


def holds(scored: Any, wanted: torch.Tensor) -> bool:
    """Do the scores of a rank contain this row's?"""
    flat = torch.tensor(scored).flatten()  # a copy: the array may be read-only
    flat = flat[flat != 0]
    return any(torch.allclose(flat[i : i + len(wanted)], wanted, atol=1e-5) for i in range(len(flat) - len(wanted) + 1))
