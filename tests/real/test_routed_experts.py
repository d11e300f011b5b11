"""A mixture of experts on a real SGLang server: sessions record which experts every token went through."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_rollout.engines import EngineConfig, EngineServer
from miles_tito import Sampling, Session, SGLangEngine, Tokenizer, Trajectory
from miles_tito.engine.expert_routing import ExpertLayout, RoutedExperts, overlap
from miles_tito.engine.generation import join, run_turn
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
MAX_GAP = 1e-4


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random layers of Qwen3-MoE, 8 experts each, 2 a token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"head_dim": 16}
    config = Qwen3MoeConfig(
        **shape,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("qwen3-moe")
    Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte a token, and ChatML's control tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: n for n, text in enumerate([*controls, *letters])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return Tokenizer(backend.to_str(), special_tokens={"eos_token": "<|im_end|>"}, template_sources={"default": CHATML})


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    options = {"skip-tokenizer-init": True, "enable-return-routed-experts": True}
    config = EngineConfig(device="cpu", context_length=2048, max_total_tokens=8192, options=options)
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    with EngineServer(config, model_path=model_path, log_path=log_path) as server:
        yield server


async def converse(engine: SGLangEngine, joiner: Joiner, name: str, *, stream: bool) -> Trajectory:
    """Three turns, each with its own question."""
    session = Session(name, joiner, max_context=2048, sampling=Sampling(max_tokens=16))
    messages: list[dict[str, Any]] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"{name}, question {number}?"})
        plan = session.plan(normalize(messages))
        turn = session.begin(plan, session.encode(plan), rid=f"{name}-{number}")
        whole = join([piece async for piece in run_turn(engine, turn.request, stream=stream)])
        turn.reader.feed(whole.output_ids)
        turn.reader.finish()
        messages.append(session.commit(turn, whole).message)
    (trajectory,) = session.trajectories()
    return trajectory


async def test_sessions_record_the_experts_and_log_probs_that_transformers_finds(
    server: EngineServer, model_path: Path, tokenizer: Tokenizer
):
    import torch
    from transformers import Qwen3MoeForCausalLM

    layout = ExpertLayout.from_folder(model_path)
    assert layout
    engine = SGLangEngine(server.url, experts=layout)
    joiner = Joiner(tokenizer, choose_family("smollm2", tokenizer))
    try:
        made = await asyncio.gather(*(converse(engine, joiner, f"s{n}", stream=bool(n % 2)) for n in range(8)))
    finally:
        await engine.aclose()
    model = Qwen3MoeForCausalLM.from_pretrained(model_path).float().eval()
    for trajectory in made:
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
        with torch.no_grad():
            out = model(tokens[None], output_router_logits=True)
        logprobs = torch.log_softmax(out.logits[0].double(), -1).numpy()
        sampled = np.flatnonzero(trajectory.loss_mask)
        gaps = logprobs[sampled - 1, trajectory.tokens[sampled]] - trajectory.logprobs[sampled]
        assert np.abs(gaps).max() <= MAX_GAP
        assert trajectory.routed_experts is not None
        assert trajectory.routed_mask is not None
        assert trajectory.routed_experts.dtype == np.uint8
        assert np.flatnonzero(~trajectory.routed_mask).tolist() == [len(tokens) - 1]
        chosen = [layer.reshape(len(tokens), -1).topk(2, -1).indices.numpy() for layer in out.router_logits]
        theirs = RoutedExperts(
            experts=np.stack(chosen, axis=1).astype(np.uint8),
            mask=np.ones(len(tokens), np.bool_),
            layers=trajectory.routed_layers,
        )
        ours = RoutedExperts(
            experts=trajectory.routed_experts, mask=trajectory.routed_mask, layers=trajectory.routed_layers
        )
        assert overlap(ours, theirs).min() >= 0.99  # ties in float32 may fall either way
