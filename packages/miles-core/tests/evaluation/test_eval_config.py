"""`[eval]`: one dataset or several, three modes, and every contradiction told."""

from __future__ import annotations

import pytest
from miles_core.evaluation.config import DatasetConfig, EvalConfig, EvalConfigError
from miles_tito.records import Sampling


def test_the_simple_form_is_one_dataset():
    config = EvalConfig(split="test", num_prompts=5, samples_per_prompt=4, sampling=Sampling(temperature=0.0))
    assert config.all_datasets == {
        "eval": DatasetConfig(
            split="test", num_prompts=5, samples_per_prompt=4, success_reward=1.0, sampling=Sampling(temperature=0.0)
        )
    }


def test_tables_are_several_datasets_with_their_own_sampling():
    tables = {"easy": DatasetConfig(split="a"), "hard": DatasetConfig(split="b", samples_per_prompt=8)}
    assert EvalConfig(datasets=tables).all_datasets == tables


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_an_evaluation_is_due_every_so_many_steps(every, due):
    config = EvalConfig(every=every)
    assert [step for step in range(7) if config.is_due(step)] == due


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": -1}, "`every` is -1; it must be at least 0"),
        ({"keep": -1}, "`keep` is -1"),
        ({"timeout_s": 0.0}, "`timeout_s` is 0.0; it must be a positive number"),
        ({"timeout_s": float("nan")}, "`timeout_s` is nan"),
        ({"samples_per_prompt": 0}, "`samples_per_prompt` is 0; it must be at least 1"),
        ({"success_reward": float("inf")}, "`success_reward` is inf"),
        ({"split": "test", "datasets": {"a": DatasetConfig()}}, "`split` is 'test' beside 1 tables"),
        ({"datasets": {"a/b": DatasetConfig()}}, "the name 'a/b'; use letters"),
        ({"external": "pkg.mod:f"}, "`external` is 'pkg.mod:f' but `mode` is 'shared'"),
        ({"mode": "external"}, "`external` is not set"),
        ({"mode": "external", "external": "python eval.py"}, "must say where the checkpoint's path goes"),
        ({"mode": "external", "external": "a:b", "num_prompts": 4}, "`num_prompts` has no effect with `mode`"),
        ({"mode": "external", "external": "a:b", "datasets": {"a": DatasetConfig()}}, "`datasets` has no effect"),
    ],
)
def test_a_contradiction_is_told_with_its_value(settings, message):
    with pytest.raises(EvalConfigError, match=message):
        EvalConfig(**settings)


def test_a_function_and_a_command_are_both_external():
    for target in ("my_pkg.evals:run", "python eval.py --model {checkpoint} --step {step}"):
        assert EvalConfig(mode="external", external=target).all_datasets == {}
