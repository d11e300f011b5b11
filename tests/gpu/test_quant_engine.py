"""An engine that holds codes starts from them, gets new ones, and computes what the trainer computes with."""

from __future__ import annotations

import json
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LEAST = {"fp8": (8, 9), "int4": (8, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
MEAN_GAP = 2e-2
"""Of log-probs in bfloat16, whose kernels sum in another order. Another scale rule costs ten times as much."""


@pytest.mark.parametrize("format", sorted(LEAST))
def test_an_engine_that_holds_codes_computes_what_the_trainer_computes_with(format: str, tmp_path: Path):
    if torch.cuda.get_device_capability() < LEAST[format]:
        pytest.skip(f"no kernels for {format} on {torch.cuda.get_device_name()}")
    for name in ("sglang", "ray", "transformers"):
        pytest.importorskip(name)
    from miles_core.actors.trainer_rank import TrainerRank
    from miles_quant import Recipe
    from miles_rollout.engines import EngineConfig, EngineServer
    from miles_train import FSDPConfig, OptimizerConfig, TrainConfig
    from miles_weightsync.config import PushConfig

    model = save_model(tmp_path / "model", experts=format == "nvfp4")
    recipe = Recipe(format=format)
    options = {"skip-tokenizer-init": True, "mem-fraction-static": 0.3}
    config = EngineConfig(device="cuda", dtype="bfloat16", context_length=512, options=options)
    rank = TrainerRank(rank=0, recipe=recipe, fetch=list)
    packed = rank.serving_folder(model, tmp_path / "codes")
    with EngineServer(config, model_path=packed, log_path=tmp_path / "engine.log") as server, closing(rank):
        training = TrainConfig(
            device="cuda", dtype="bfloat16", fsdp=FSDPConfig(layout="padded"), optimizer=OptimizerConfig(lr=1e-3)
        )
        rank.setup(training, model, None)
        lm: Any = rank._trainer._state.model.lm
        with torch.no_grad():  # new weights, which only a push can have brought
            for parameter in lm.parameters():
                parameter.mul_(1.01)
        # The layout of codes is not known to the checksums.
        rank.connect([server.url], PushConfig(dtype="keep", verify="none"))
        assert not rank.push(1, [server.url]).failed
        ids = torch.randint(3, 512, (96,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits = lm(ids[None].cuda()).logits[0, :-1].float().cpu()
        trained_on = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        gap = (torch.tensor(engine_logprobs(server.url, ids.tolist())) - trained_on).abs().mean().item()
        assert gap <= MEAN_GAP, f"{format}: trainer and engine are {gap:.1e} apart on average"


def save_model(path: Path, *, experts: bool) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "initializer_range": 0.1,
        "dtype": "bfloat16",
    }
    if experts:
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
        lm: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **more))
    else:
        lm = Qwen3ForCausalLM(Qwen3Config(**shape))
    lm.bfloat16().save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def engine_logprobs(url: str, tokens: list[int]) -> list[float]:
    """Of every token but the first."""
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return [logprob for logprob, *_ in json.load(answer)["meta_info"]["input_token_logprobs"]][1:]
