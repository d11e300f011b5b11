"""Tiny random models and samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from miles_tito import Sample, VersionSpan

VOCAB = 67
"""Odd, so that no number of ranks divides it."""


def make_sample(
    name: str, length: int, *, prompt: int = 3, seed: int = 0, version: int = 0, **fields: object
) -> Sample:
    """A sample of random tokens, all after the prompt trained, with plausible engine log-probs."""
    rng = np.random.default_rng([seed, length])
    mask = np.arange(length) >= prompt
    known: dict[str, object] = {
        "id": name,
        "episode_id": f"episode-{name}",
        "group_id": "g",
        "prompt_id": "p",
        "tokens": rng.integers(0, VOCAB, length).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, rng.uniform(-5, -3.5, length), 0).astype(np.float32),
        "advantage": float(rng.normal()),
        "loss_denominator": int(np.asarray(fields.get("loss_mask", mask)).sum()) or 1,
        "versions": (VersionSpan(start=0, end=length, version=version),),
    }
    return Sample(**(known | fields))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def sample() -> Callable[..., Sample]:
    return make_sample


def save_model(path: Path, *, family: str = "qwen3", tied: bool = True, seed: int = 0) -> Path:
    """A random model of odd shapes as a Hugging Face folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    match family:
        case "qwen3":
            config = transformers.Qwen3Config(**shape)
        case "llama":
            config = transformers.LlamaConfig(**shape)
        case "mistral":
            config = transformers.MistralConfig(**shape, sliding_window=8)
        case "granite":
            config = transformers.GraniteConfig(**(shape | {"head_dim": 12}), logits_scaling=3.0)
        case "qwen3_moe":
            config = transformers.Qwen3MoeConfig(
                **shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20
            )
        case "mixtral":
            config = transformers.MixtralConfig(**shape, num_local_experts=2)
        case "gpt2":
            config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=36, n_layer=2, n_head=3)
        case _:
            raise ValueError(family)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def make_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied head."""
    return save_model(tmp_path_factory.mktemp("llama"), family="llama", tied=False)
