from __future__ import annotations

import json

import pytest
from miles_envs.errors import EnvironmentSetupError
from miles_envs.reasoning import UNSOUND, ReasoningGym, reasoning_gym, reasoning_gym_score
from scripted_model import said


@pytest.fixture(autouse=True)
def _quiet_imports(recwarn):
    """Libraries behind reasoning-gym warn when they are compiled."""


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "basic_arithmetic"])
def test_a_tasks_own_answer_scores_one_and_others_less(name):
    prompts = reasoning_gym(name, seed=3, size=5)
    for prompt in prompts:
        assert reasoning_gym_score(prompt, said(f"so <answer> {prompt.task['label']} </answer>")) == 1.0
        assert reasoning_gym_score(prompt, said("<answer>nonsense</answer>")) < 1.0
        assert reasoning_gym_score(prompt, said(prompt.task["label"])) == 0.0


def test_the_last_answer_counts():
    (prompt,) = reasoning_gym("chain_sum", size=1)
    label = prompt.task["label"]
    assert reasoning_gym_score(prompt, said(f"<answer>x</answer> no: <answer>{label}</answer>")) == 1.0


def test_problems_are_the_same_for_the_same_seed_and_plain_data():
    first, again, other = (reasoning_gym("chain_sum", seed=s, size=4, min_terms=3) for s in (1, 1, 2))
    assert first == again
    assert not {p.messages[0]["content"] for p in first} & {p.messages[0]["content"] for p in other}
    assert json.loads(json.dumps(first[0].task)) == first[0].task


@pytest.mark.parametrize("name", UNSOUND)
def test_a_task_with_an_unsound_scorer_is_refused_with_the_reason(name):
    with pytest.raises(EnvironmentSetupError, match=UNSOUND[name]):
        reasoning_gym(name)


@pytest.mark.parametrize(("name", "options"), [("no_such_task", {}), ("chain_sum", {"no_such_option": 1})])
def test_an_unknown_task_or_option_is_named(name, options):
    with pytest.raises(EnvironmentSetupError, match=f"cannot make '{name}'"):
        reasoning_gym(name, size=1, **options)


def test_heldout_problems_are_not_among_the_training_ones():
    env = ReasoningGym(name="chain_sum", size=50, heldout_size=20, options={"max_terms": 2, "max_digits": 2})
    train, heldout = ({p.messages[0]["content"] for p in env.tasks(split)} for split in ("train", "heldout"))
    assert 0 < len(heldout) <= 20
    assert not train & heldout


def test_a_task_too_small_to_hold_anything_out_is_refused():
    with pytest.raises(EnvironmentSetupError, match="All 3 held-out problems of 'chain_sum' are among the 400"):
        ReasoningGym(name="chain_sum", size=400, heldout_size=3, options={"max_terms": 2, "max_digits": 1})
