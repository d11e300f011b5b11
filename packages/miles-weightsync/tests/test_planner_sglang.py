"""The planner's layouts against the real thing: a receiver writes what SGLang loads from the same checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("miles_rollout") is None:
    pytest.skip("needs SGLang and the CPU launcher of miles-rollout", allow_module_level=True)

from miles_weightsync import PushConfig
from miles_weightsync.config import LOADER
from miles_weightsync.push import Pusher
from safetensors.torch import load_file
from test_sglang import call, server
from test_staged_sglang import greedy
from weightsync_fakes import shards

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(240)]

BASE: dict[str, Any] = {
    "vocab_size": 300,  # no multiple of 64: the engine pads it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}  # half of it is a block of the engine
SHARED: dict[str, Any] = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**MOE, "head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "Glm4Moe": {**SHARED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "DeepseekV3": {
        **SHARED,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
# SGLang's rope for latent attention on a CPU knows this one only.
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    "rope_scaling": YARN,
    "rope_theta": 10000.0,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def save(kind: str, folder: Path, *, seed: int) -> dict[str, torch.Tensor]:
    """A random checkpoint of a family, and its tensors under the names that they have on disk."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**BASE, **KINDS[kind]})
    )
    for tensor in model.state_dict().values():  # norms and biases are alike at first, where mistakes do not show
        if tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5)
    model.float().save_pretrained(folder)
    if kind == "DeepseekV3":
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | DEEPSEEK))
    return load_file(folder / "model.safetensors")


def checksums(url: str) -> dict[str, str]:
    """SGLang's own, of every parameter of every rank."""
    found = call(url, "/weights_checker", {"action": "checksum"})
    return {
        f"{rank}/{name}": value for rank, own in enumerate(found["ranks"]) for name, value in own["checksums"].items()
    }


@pytest.mark.parametrize(("kind", "tp"), [("Qwen3Moe", 2), ("Glm4Moe", 1), ("DeepseekV3", 2)])
def test_a_receiver_writes_what_sglang_loads_parameter_for_parameter(kind: str, tp: int, tmp_path: Path) -> None:
    mine = save(kind, tmp_path, seed=0)
    other = save(kind, tmp_path / "other", seed=1)
    with server(tmp_path, tp=tp, custom_weight_loader=LOADER) as started:
        url = started.url
        loaded, said = checksums(url), greedy(url)
        config = PushConfig(way="staged", bucket_bytes=64 * 1024, timeout_s=60, delta="off")
        with Pusher([url], config=config) as pusher:
            found = pusher.verify(shards(mine))[url]
            assert found.is_equal, found
            assert not pusher.verify(shards(other))[url].is_equal
            pusher.push(shards(other), version=1)
            assert pusher.verify(shards(other))[url].is_equal
            now = checksums(url)
            assert now.keys() == loaded.keys()
            # What no checkpoint holds, such as tables of positions, stays; every parameter is another.
            unchanged = {name.partition("/")[2] for name in now if now[name] == loaded[name]}
            assert not [name for name in unchanged if name.endswith(("weight", "bias"))]
            assert greedy(url)[0] != said[0]
            pusher.push(shards(mine), version=2)
        assert checksums(url) == loaded
        assert greedy(url) == said
        with Pusher([url], config=PushConfig(bucket_bytes=64 * 1024, timeout_s=60)) as pusher:
            assert pusher.push(shards(other), version=3).engines[0].verified == "all"
        assert checksums(url) == now
