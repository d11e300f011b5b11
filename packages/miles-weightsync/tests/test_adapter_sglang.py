"""LoRA adapters in a real SGLang server on the CPU: each request is answered by the version that it names."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("miles_rollout") is None:
    pytest.skip("needs SGLang and the CPU launcher of miles-rollout", allow_module_level=True)

from miles_weightsync import PushConfig
from miles_weightsync.push import Pusher
from test_sglang import PROMPT, assert_scored_by, call, make_model, server
from weightsync_fakes import shards

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(240)]

RANK, ALPHA = 4, 8
TARGETS = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
NAMES = [name for names in TARGETS.values() for name in names]
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": NAMES, "bias": "none", "peft_type": "LORA"}
OPTIONS: dict[str, Any] = {
    "enable-lora": True,
    "lora-backend": "torch_native",
    "max-lora-rank": RANK,
    "lora-target-modules": NAMES,
    "max-loras-per-batch": 3,
}


def adapter_of(model: Any, version: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Random tensors of an adapter under PEFT's names, and the model with it merged."""
    generator = torch.Generator().manual_seed(version)
    merged, tensors = copy.deepcopy(model), dict[str, torch.Tensor]()
    for index, layer in enumerate(merged.model.layers):
        for block, names in TARGETS.items():
            for name in names:
                weight = getattr(getattr(layer, block), name).weight.data
                a = torch.randn(RANK, weight.shape[1], generator=generator) / 8
                b = torch.randn(weight.shape[0], RANK, generator=generator) / 8
                prefix = f"base_model.model.model.layers.{index}.{block}.{name}"
                tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
                weight += ALPHA / RANK * b @ a
    return tensors, merged


def generate(url: str, adapter: str | None) -> tuple[list[int], list[float]]:
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True},
        **({"lora_path": adapter} if adapter else {}),
    }
    answer = call(url, "/generate", body)
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_is_answered_by_the_version_that_it_names_and_the_base_by_no_adapter(tp: int, tmp_path: Path) -> None:
    # No multiple of 64 would be padded on a CPU, and SGLang 0.5.23 does not pad adapters with it.
    model = make_model("Qwen3", intermediate_size=128)
    model.save_pretrained(tmp_path)
    adapters = {version: adapter_of(model, version) for version in (1, 2, 3)}
    with (
        server(tmp_path, tp=tp, **OPTIONS) as engine,
        Pusher([engine.url], config=PushConfig(timeout_s=60)) as pusher,
    ):
        for version, (tensors, _) in adapters.items():
            pusher.push_adapter(shards(tensors), name="policy", version=version, adapter_config=CONFIG)
            for known in (version - 1, version) if version > 1 else (version,):
                assert_scored_by(adapters[known][1], *generate(engine.url, f"policy@{known}"), 0, 12)
            assert_scored_by(model, *generate(engine.url, None), 0, 12)
        with pytest.raises(AssertionError, match="policy@1"):  # unloaded when the third one came
            generate(engine.url, "policy@1")
