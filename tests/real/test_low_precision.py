"""Low precision against a real SGLang server: after a push it computes what the trainer computes with."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from miles_core.actors.trainer_rank import TrainerRank
from miles_quant import Recipe
from miles_rollout.engines import EngineConfig, EngineServer
from miles_train import FSDPConfig, OptimizerConfig, TrainConfig
from miles_weightsync.config import PushConfig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

FORMATS = {"dense": ("mxfp8", "fp8", "int4", "mxfp4"), "moe": ("nvfp4", "nvfp4_4o6", "mxfp8")}
TRAINING = TrainConfig(device="cpu", fsdp=FSDPConfig(layout="padded"), optimizer=OptimizerConfig(lr=1e-3))
MAX_GAP = 1e-4
"""Of log-probs: float32 on both sides, sums in another order."""
MIN_EFFECT = 1e-2
"""What rounding does to log-probs at least: below it, equality would show nothing."""
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,  # SGLang 0.5 ignores the tie in Qwen3-MoE
    "eos_token_id": 2,
    "dtype": "float32",
}


@pytest.fixture(scope="module", params=sorted(FORMATS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(kind)
    if kind == "dense":
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(path)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    options = {"skip-tokenizer-init": True}
    config = EngineConfig(device="cpu", context_length=512, max_total_tokens=4096, threads=1, options=options)
    with EngineServer(config, model_path=model, log_path=tmp_path_factory.mktemp("log") / "engine.log") as server:
        yield server


def engine_logprobs(server: EngineServer, tokens: list[int]) -> list[float]:
    """Of every token but the first."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, *_ in found] == tokens
    return [logprob for logprob, *_ in found[1:]]


@pytest.mark.filterwarnings("ignore:The parameter layout of")  # that of experts may be checked in part only
def test_after_a_push_the_engine_computes_what_the_trainer_computes_with(
    kind: str, model: Path, server: EngineServer, tmp_path: Path
):
    import torch
    from miles_quant import convert, differing, quantize_shards, with_digests
    from miles_quant.checkpoints.folder import ModelFolder
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 512, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor(tokens)
    for version, format in enumerate(FORMATS[kind], start=1):
        recipe = Recipe(format=format, quantize_activations=False)
        rank = TrainerRank(rank=0, recipe=recipe, fetch=list)
        rank.setup(TRAINING, model, None)
        rank.connect([server.url], PushConfig())
        pushed = rank.push(version, [server.url])
        assert not pushed.failed
        trainer: Any = rank._trainer
        lm: Any = trainer._state.model.lm
        with torch.no_grad():
            trained_on = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        gap = (torch.tensor(engine_logprobs(server, tokens)) - trained_on).abs().max().item()
        assert gap <= MAX_GAP, f"{format}: trainer and engine are {gap:.1e} apart"

        digests: list[Any] = []
        list(with_digests(quantize_shards(trainer.shards, recipe.for_model(2)), digests))
        rank.export(tmp_path / f"{format}-master")
        rank.close()
        convert(tmp_path / f"{format}-master", tmp_path / f"{format}-codes", recipe, is_quiet=True)
        codes = ModelFolder(tmp_path / f"{format}-codes")
        assert differing(digests, {name: codes.read(name) for name in codes.infos}) == []

        plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.no_grad():
            unrounded = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert (unrounded - trained_on).abs().max() > MIN_EFFECT, f"{format} changes nothing: this shows nothing"
