from __future__ import annotations

import asyncio
import functools
import math

import grader_functions as functions
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_envs.errors import EnvironmentSetupError, GraderTimeout, VerifierError
from miles_envs.rewards import Grader, exact_match, read_score, token_f1
from miles_envs.rewards.f1 import f1, words
from scripted_model import question, said


def scored(reward, text="1", *, timeout_s=30.0, prompt=None):
    async def run():
        grader = Grader(reward, timeout_s=timeout_s)
        try:
            return await grader.grade(prompt or question(), said(text), sample="episode 7")
        finally:
            await grader.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is None"),
        (math.nan, "is nan, not a finite number"),
        (-math.inf, "is -inf, not a finite number"),
        ("1.0", r"is '1.0' \(str\), not a number"),
        (np.float32("nan"), "is nan, not a finite"),
        (np.array([1.0]), "ndarray"),
        ({"score": 1.0, "length": 3}, r"the keys \['length', 'score'\] but without 'reward'"),
        ({"reward": None}, "is None"),
        ({"reward": math.inf}, "is inf"),
    ],
)
def test_no_finite_number_is_no_reward_and_the_reason_is_given(value, reason):
    with pytest.raises(VerifierError, match=f"The reward of episode 7 .*{reason}"):
        read_score(value, sample="episode 7")


@pytest.mark.parametrize("value", [1, 1.0, True, np.int64(1), np.float32(1), np.bool_(True), {"reward": 1}])
def test_any_finite_number_is_a_reward(value):
    assert read_score(value, sample="x").reward == 1.0


@given(reward=st.floats(allow_nan=False, allow_infinity=False), extra=st.dictionaries(st.text(), st.floats(-9, 9)))
def test_a_mapping_gives_its_reward_and_its_other_numbers(reward, extra):
    extra.pop("reward", None)
    score = read_score({**extra, "reward": reward}, sample="x")
    assert score.reward == reward
    assert score.metrics == extra


def test_a_metric_that_is_missing_is_left_out_and_a_bad_one_said(caplog):
    score = read_score({"reward": 1, "style": None, "speed": math.nan, "length": 3}, sample="episode 7")
    assert score.metrics == {"length": 3.0}
    assert "Metric 'speed' of episode 7 is nan" in caplog.text


def test_a_plain_function_is_graded_in_a_process_and_an_import_string_finds_it():
    assert scored(functions.by_text, "0.25").reward == 0.25
    assert scored("grader_functions:by_text", "0.25").reward == 0.25
    assert scored(functools.partial(functions.with_bonus, bonus=2), "1").reward == 3


def test_an_async_function_is_awaited_and_may_reach_its_closure():
    seen = []

    async def reward(prompt, messages):
        seen.append(prompt.id)
        return {"reward": 0.5, "length": 2}

    assert scored(reward).metrics == {"length": 2.0}
    assert seen == ["p"]


def test_an_async_reward_that_hangs_is_given_up_with_the_sample_named(caplog):
    async def reward(prompt, messages):
        await asyncio.Event().wait()

    with pytest.raises(GraderTimeout, match=r"episode 7 took longer than 0\.05 s"):
        scored(reward, timeout_s=0.05)
    assert "episode 7" in caplog.text


@pytest.mark.parametrize("error", [KeyError("label"), TimeoutError("its own")])
def test_an_async_reward_that_raises_is_no_reward(error):
    async def reward(prompt, messages):
        raise error

    with pytest.raises(VerifierError, match=f"episode 7 raised {type(error).__name__}") as caught:
        scored(reward)
    assert not isinstance(caught.value, GraderTimeout)


def test_a_function_that_no_process_could_import_is_refused_at_once_with_advice():
    with pytest.raises(EnvironmentSetupError, match=r"cannot be sent there.*top of a module.*`async`"):
        Grader(lambda prompt, messages: 1.0)


def test_a_function_of_the_started_script_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(functions.with_bonus, "__module__", "__main__")
    with pytest.raises(EnvironmentSetupError, match="with_bonus is defined in the script that was started"):
        Grader(functions.with_bonus)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("grader_functions:nothing", "grader_functions has no 'nothing'"),
        ("grader_functions:ctypes.c_int.x", "grader_functions has no 'x'"),
        ("grader_functions:ctypes", "cannot be called"),
        ("grader_functions:os.getpid", "2 positional arguments .* do not fit"),
        ("x y", "write it as"),
    ],
)
def test_an_import_string_that_leads_to_no_reward_is_refused(name, message):
    with pytest.raises(EnvironmentSetupError, match=f"`reward` is '{name}'.*{message}"):
        Grader(name)


def test_an_import_string_may_have_a_dot_before_the_function():
    assert scored("miles_envs.rewards.exact_match", "4").reward == 1


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [(0, "0", 1), (0, "", 0), ("", "", 1), (42, " 42\n", 1), (42, "42.", 0), (["yes", "y"], "y", 1), (0.5, "0.5", 1)],
)
def test_exact_match_compares_text_and_takes_zero_for_a_label(label, answer, expected):
    assert exact_match(question(label=label), said(answer)) == expected


def test_a_prompt_without_label_cannot_be_graded():
    with pytest.raises(VerifierError, match=r"Prompt p has no label .*\['label'\]"):
        exact_match(question(label=None), said("1"))


def test_a_conversation_without_an_answer_scores_as_an_empty_one():
    assert exact_match(question(label="4"), [{"role": "user", "content": "?"}]) == 0
    assert exact_match(question(label="4"), [{"role": "assistant", "content": None}]) == 0


@pytest.mark.parametrize(
    ("label", "answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0),
        ("Eiffel Tower", "the tower of Pisa", 0.4),
        ("Paris", "", 0.0),
        (["Rome", "the city of Rome"], "Rome", 1.0),
        ("x y y", "x x y", 2 / 3),
    ],
)
def test_token_f1_is_squads(label, answer, expected):
    assert token_f1(question(label=label), said(answer)) == pytest.approx(expected)


@given(st.lists(st.sampled_from("xyz")), st.lists(st.sampled_from("xyz")))
def test_f1_is_symmetric_bounded_and_one_only_for_the_same_words(left, right):
    score = f1(left, right)
    assert score == f1(right, left)
    assert 0 <= score <= 1
    assert (score == 1) == (sorted(left) == sorted(right))


def test_words_drop_case_punctuation_and_articles():
    assert words("The cat, a dog; AN owl's.") == ["cat", "dog", "owls"]
