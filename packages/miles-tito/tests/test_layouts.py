"""Samples as other trainers load them, through their own loaders where those are installed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from miles_tito import Sample, SampleError, VersionSpan
from miles_tito.adapters.layouts import to_slime, to_trl, to_verl


def sample(name: str, tokens: list[int], mask: list[int], **changes: Any) -> Sample:
    length = len(tokens)
    return Sample(
        **{
            "id": name,
            "episode_id": f"episode {name}",
            "group_id": "g",
            "prompt_id": "p",
            "tokens": np.array(tokens, np.int32),
            "loss_mask": np.array(mask, bool),
            "logprobs": np.where(np.array(mask, bool), -0.5, 0.0).astype(np.float32),
            "advantage": 1.0,
            "loss_denominator": max(sum(mask), 1),
            "versions": (VersionSpan(start=0, end=length, version=3),),
            "reward": 0.25,
            "metadata": {"num_turns": 2, "finish_reason": "stop"},
            **changes,
        }
    )


TWO_TURNS = sample("a", [5, 6, 7, 8, 9, 10, 11], [0, 0, 1, 1, 0, 1, 1])
CUT = sample("b", [5, 6, 7], [0, 1, 1], metadata={"finish_reason": "length"}, group_id="h")


def test_slime_gets_the_response_from_the_first_sampled_token_on():
    first, second = to_slime([TWO_TURNS, CUT], responses=["x", "y"])
    assert (first["tokens"], first["response_length"]) == ([5, 6, 7, 8, 9, 10, 11], 5)
    assert first["loss_mask"] == [1, 1, 0, 1, 1]
    assert first["rollout_log_probs"] == [-0.5, -0.5, 0.0, -0.5, -0.5]
    assert len(first["loss_mask"]) == len(first["rollout_log_probs"]) == first["response_length"]
    assert (first["status"], second["status"]) == ("completed", "truncated")
    assert (first["group_index"], second["group_index"], second["index"]) == (0, 1, 1)
    assert (first["weight_versions"], first["reward"], second["response"]) == (["3"], 0.25, "y")


FIELDS_OF_SLIME = {
    *("group_index", "index", "prompt", "tokens", "response", "response_length", "reward", "loss_mask"),
    *("weight_versions", "rollout_log_probs", "rollout_routed_experts", "status", "metadata", "session_id"),
}
"""Of its `Sample`, whose package is not on PyPI."""


def test_slime_knows_every_field():
    assert set(to_slime([CUT])[0]) == FIELDS_OF_SLIME


def test_slime_gets_one_row_of_experts_a_token_but_the_last():
    experts = np.arange(3 * 2 * 1, dtype=np.uint8).reshape(3, 2, 1)
    whole = sample(
        "r", [5, 6, 7], [0, 1, 1], routed_experts=experts, routed_mask=np.array([1, 1, 0], bool), routed_layers=(0, 1)
    )
    rows = to_slime([whole])[0]["rollout_routed_experts"]
    assert rows.dtype == np.int32
    assert rows.tolist() == experts[:2].tolist()
    holes = sample(
        "r", [5, 6, 7], [0, 1, 1], routed_experts=experts, routed_mask=np.array([1, 0, 0], bool), routed_layers=(0, 1)
    )
    with pytest.raises(SampleError, match="lacks the experts of 1 of 2 tokens"):
        to_slime([holes])


def test_verl_gets_padded_arrays():
    tensors, columns = to_verl([TWO_TURNS, CUT], prompt_length=3, response_length=6, pad_token_id=0)
    assert tensors["prompts"].tolist() == [[0, 5, 6], [0, 0, 5]]
    assert tensors["responses"].tolist() == [[7, 8, 9, 10, 11, 0], [6, 7, 0, 0, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0, 0]]
    assert tensors["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 6], [0, 0, 0, 1, 2, 2, 2, 2, 2]]
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert np.argwhere(tensors["rm_scores"]).tolist() == [[0, 4], [1, 1]]
    assert columns["uid"].tolist() == ["g", "h"]


def test_a_sample_that_does_not_fit_is_not_cut():
    with pytest.raises(SampleError, match="a prompt of 2 and a response of 5 tokens; the batch has 3 and 4"):
        to_verl([TWO_TURNS], prompt_length=3, response_length=4, pad_token_id=0)


def test_a_sample_that_trains_nothing_is_refused():
    with pytest.raises(SampleError, match="trains none of its 2 tokens"):
        to_trl([sample("n", [1, 2], [0, 0])])


@pytest.mark.filterwarnings("ignore")
def test_verls_own_batch_takes_them_and_weighs_the_sampled_tokens():
    try:
        verl: Any = importlib.import_module("verl")
        algorithms: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        pytest.skip(f"verl cannot be imported: {error}")
    import torch

    tensors, columns = to_verl([TWO_TURNS, CUT], prompt_length=3, response_length=6, pad_token_id=0)
    tensors = {key: torch.from_numpy(value) for key, value in tensors.items()}
    batch = verl.DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"temperature": 1.0})
    joined = verl.DataProto.concat(batch.chunk(2))
    assert len(joined) == 2
    assert joined.non_tensor_batch["uid"].tolist() == ["g", "h"]
    mask = joined.batch["response_mask"]
    assert mask.sum(-1).tolist() == [4, 2]
    loss = algorithms.agg_loss(torch.ones(2, 6), mask, loss_agg_mode="token-mean")
    assert float(loss) == pytest.approx(1.0)
    advantages, _ = algorithms.compute_grpo_outcome_advantage(joined.batch["rm_scores"], mask, columns["uid"])
    assert (advantages[mask == 0] == 0).all()


def test_trl_gets_what_a_rollout_function_returns():
    out = to_trl([TWO_TURNS, CUT])
    assert {"prompt_ids", "completion_ids", "logprobs"} <= set(out)
    assert out["prompt_ids"] == [[5, 6], [5]]
    assert out["completion_ids"] == [[7, 8, 9, 10, 11], [6, 7]]
    assert out["env_mask"] == [[1, 1, 0, 1, 1], [1, 1]]
    assert [len(row) for row in out["logprobs"]] == [len(row) for row in out["completion_ids"]]
    assert out["reward"] == [0.25, 0.25]


@pytest.mark.filterwarnings("ignore")
def test_trls_trainer_takes_a_step_on_them(tmp_path: Any):
    """What the trainer makes of a rollout: the ids as they were, and only sampled tokens in the loss."""
    try:
        trl: Any = importlib.import_module("trl.trainer.grpo_trainer")
        datasets: Any = importlib.import_module("datasets")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"TRL's trainer cannot be imported: {error}")
    import torch
    from models_at_hand import stand_in
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(stand_in(("<|end|>",))), eos_token="<|end|>", pad_token="<|end|>"
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=400, num_key_value_heads=2, head_dim=16, **shape))
    rewards: list[float] = []

    def reward_of(completions: Any, reward: list[float], **_: Any) -> list[float]:
        rewards.extend(reward)
        return reward

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        max_completion_length=16,
        beta=0.0,
    )
    other = sample("b", [5, 6, 7], [0, 1, 1], reward=1.0)
    trainer = trl.GRPOTrainer(
        model=model,
        args=settings,
        train_dataset=datasets.Dataset.from_list([{"prompt": "q"}] * 2),
        processing_class=tokenizer,
        reward_funcs=reward_of,
        rollout_func=lambda prompts, trainer: to_trl([TWO_TURNS, other]),
    )
    batch = trainer._generate_and_score_completions([{"prompt": "q"} for _ in range(2)])
    assert batch["completion_ids"][0].tolist()[:5] == [7, 8, 9, 10, 11]
    assert (batch["completion_mask"] * batch["tool_mask"]).sum(-1).tolist() == [4, 2]
    assert rewards == [0.25, 1.0]
    assert batch["advantages"][0] < 0 < batch["advantages"][1]
    trainer.train()
