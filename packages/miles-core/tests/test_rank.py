"""The whole path of a gradient: raw rewards, advantages, plan, batches, one trainer rank, against the closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from core_records import VOCAB, make_group
from miles_core.actors.trainer_rank import TrainerRank
from miles_core.batching import RankWork, plan_ranks
from miles_rollout.advantages import advantages_by_episode
from miles_tito.records import Episode, Group, Trajectory
from miles_tito.records.summary import summarize
from miles_train import LossConfig, OptimizerConfig, TrainConfig
from miles_train.losses.settings import Normalization

WHOLE, SPLIT = 4096, 12
"""Token budgets: everything in one micro-batch, and several of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of odd shapes as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> torch.nn.Module:
    """The same weights outside the trainer."""
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture
def rank() -> Iterator[TrainerRank]:
    made = TrainerRank(rank=0, fetch=list)
    yield made
    made.close()


def settings(normalization: Normalization = "episode", *, token_budget: int = WHOLE) -> TrainConfig:
    return TrainConfig(
        device="cpu",
        threads=1,
        token_budget=token_budget,
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=None),
        loss=LossConfig(normalization=normalization, max_tokens=16 if normalization == "dr_grpo" else None),
    )


def logprobs(reference: Any, trajectory: Trajectory) -> torch.Tensor:
    """[T - 1] log-probs of tokens 1, 2, …"""
    ids = torch.tensor(trajectory.tokens.astype(np.int64))[None]
    return torch.log_softmax(reference(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]


def on_policy(group: Group, reference: Any) -> Group:
    """The same group, as an engine with these very weights would have recorded it."""

    def scored(trajectory: Trajectory) -> Trajectory:
        with torch.no_grad():
            values = np.concatenate([[0], logprobs(reference, trajectory).numpy()])
        return replace(trajectory, logprobs=np.where(trajectory.loss_mask, values, 0))

    episodes = (replace(e, trajectories=tuple(scored(t) for t in e.trajectories)) for e in group.episodes)
    return replace(group, episodes=tuple(episodes))


def work_of(groups: Sequence[Group], *, token_budget: int) -> RankWork:
    (work,) = plan_ranks(
        [summarize(group) for group in groups],
        advantages=partial(advantages_by_episode, advantage="dr_grpo"),
        token_budget=token_budget,
        ranks=1,
        minibatches=1,
    )
    return work


def grad_norm(rank: TrainerRank, model: Path, groups: Sequence[Group], config: TrainConfig) -> float:
    rank.setup(config, model, None)
    work = work_of(groups, token_budget=config.token_budget)
    return rank.train(work).metrics["optimizer/grad_norm"]


def closed_form(reference: Any, groups: Sequence[Group], *, normalization: Normalization) -> float:
    """Norm of the gradient of - Σ weight · advantage · log p, with the weights written out as in the papers."""
    episodes = [e for group in groups for e in group.episodes if e.reward is not None]
    tokens = sum(e.loss_denominator for e in episodes)
    loss = torch.zeros(())
    for group in groups:
        scored = [e.reward for e in group.episodes if e.reward is not None]
        for episode in (e for e in group.episodes if e.reward is not None):
            weight = {
                "episode": 1 / (len(episodes) * episode.loss_denominator),
                "token": 1 / tokens,
                "dr_grpo": 1 / (len(episodes) * 16),
            }[normalization]
            advantage = episode.reward - sum(scored) / len(scored)
            for trajectory in episode.trajectories:
                mask = torch.tensor(trajectory.loss_mask[1:])
                loss = loss - weight * advantage * logprobs(reference, trajectory)[mask].sum()
    reference.zero_grad()
    loss.backward()
    return float(torch.sqrt(sum((p.grad**2).sum() for p in reference.parameters() if p.grad is not None)))


@pytest.fixture(scope="module")
def groups(reference: Any) -> list[Group]:
    """Long and short episodes, one of three trajectories, one that failed (A01, A04, A06 in kind)."""
    made = [
        make_group("a", [[9, 6, 4], [11], []], [1.0, 0.5, None]),
        make_group("b", [[3], [12], [5, 5]], [0.0, 1.0, 0.25]),
    ]
    return [on_policy(group, reference) for group in made]


@pytest.mark.parametrize("token_budget", [WHOLE, SPLIT])
@pytest.mark.parametrize("normalization", ["episode", "token", "dr_grpo"])
def test_the_gradient_is_the_closed_form_of_raw_rewards(
    rank: TrainerRank,
    model: Path,
    reference: Any,
    groups: list[Group],
    normalization: Normalization,
    token_budget: int,
) -> None:
    got = grad_norm(rank, model, groups, settings(normalization, token_budget=token_budget))
    assert got == pytest.approx(closed_form(reference, groups, normalization=normalization), rel=1e-4)


@pytest.mark.parametrize("normalization", ["episode", "token", "dr_grpo"])
def test_an_episode_told_as_two_trajectories_has_the_gradient_of_one(
    rank: TrainerRank, model: Path, groups: list[Group], normalization: Normalization
) -> None:
    def halves(episode: Episode) -> Episode:
        """The same ids twice; the first trains the earlier half of the sampled tokens, the second the rest."""
        (whole,) = episode.trajectories
        middle = np.arange(len(whole.tokens)) < 7
        parts = (
            replace(whole, id=f"{whole.id}-{n}", loss_mask=whole.loss_mask & m) for n, m in enumerate([middle, ~middle])
        )
        return replace(episode, trajectories=tuple(parts))

    told_in_two = replace(
        groups[1], episodes=tuple(halves(e) if i == 1 else e for i, e in enumerate(groups[1].episodes))
    )
    config = settings(normalization)
    once = grad_norm(rank, model, groups, config)
    assert grad_norm(rank, model, [groups[0], told_in_two], config) == pytest.approx(once, rel=1e-5)


def test_each_batch_is_a_new_version_with_its_counts(rank: TrainerRank, model: Path, groups: list[Group]) -> None:
    rank.setup(settings(), model, None)
    work = work_of(groups, token_budget=WHOLE)
    trained = [rank.train(work) for _ in range(2)]
    assert [one.version for one in trained] == [1, 2]
    assert trained[0].metrics["batch/episodes"] == 5, "the failed one is not trained"
    assert trained[0].metrics["logprob_gap/max"] < 1e-4, "these weights sampled the tokens"
    assert trained[1].metrics["logprob_gap/max"] > 1e-3, "and these did not"


def test_setup_starts_over_with_another_model_in_the_same_process(
    rank: TrainerRank, model: Path, groups: list[Group], tmp_path: Path
) -> None:
    rank.setup(settings(), model, None)
    work = work_of(groups, token_budget=WHOLE)
    rank.train(work)
    rank.export(tmp_path / "warm")
    rank.setup(settings(), tmp_path / "warm", None)
    again = rank.train(work)
    assert again.version == 1
    assert again.metrics["logprob_gap/max"] > 1e-3, "it starts from what was trained before"
