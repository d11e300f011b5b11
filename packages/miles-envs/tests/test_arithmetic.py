from __future__ import annotations

import json

import pytest
from miles_envs.tasks.arithmetic import JsonSum, ToolSum, add, is_heldout, pairs, sft_conversations
from miles_tito.records import Outcome
from scripted_model import calls, ctx


def operands(text: str) -> tuple[int, int]:
    a, b = text.removesuffix("=?").split("+")
    return int(a), int(b)


@pytest.mark.parametrize("task", [ToolSum, JsonSum])
def test_no_heldout_sum_is_trained_on_in_either_order(task):
    train, heldout = (set(pairs(split, task.operands, one_in=task.one_in)) for split in ("train", "heldout"))
    assert train | heldout == {(a, b) for a in task.operands for b in task.operands}
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}
    assert 0.05 < len(heldout) / len(train) < 0.3


@pytest.mark.parametrize("task", [ToolSum, JsonSum])
def test_prompts_are_the_same_every_time_and_plain(task):
    for split in ("train", "heldout"):
        prompts = list(task().tasks(split))
        assert prompts == list(task().tasks(split))
        assert len({prompt.id for prompt in prompts}) == len(prompts) >= 30
        assert json.loads(json.dumps(prompts[0].task)) == prompts[0].task


def test_the_warm_up_shows_no_heldout_sum_anywhere():
    for row in sft_conversations(seed=3, n=3000):
        assert not is_heldout(operands(row["messages"][0]["content"]), one_in=10)
        for call in row["messages"][1].get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            assert not is_heldout((arguments["a"], arguments["b"]), one_in=10)


def test_the_warm_up_is_noisy_as_asked_and_the_tool_is_always_right():
    rows = list(sft_conversations(seed=0, n=4000))
    with_tool = [row["messages"] for row in rows if len(row["messages"]) == 4]
    called = [tuple(json.loads(m[1]["tool_calls"][0]["function"]["arguments"]).values()) for m in with_tool]
    assert len(with_tool) / len(rows) == pytest.approx(0.4, abs=0.03)
    wrong_calls = sum(pair != operands(m[0]["content"]) for pair, m in zip(called, with_tool, strict=True))
    assert wrong_calls / len(with_tool) == pytest.approx(0.25, abs=0.03)
    assert all(m[2]["content"] == str(add(*pair)) for pair, m in zip(called, with_tool, strict=True))
    wrong_copies = sum(m[2]["content"] != m[3]["content"] for m in with_tool)
    assert wrong_copies / len(with_tool) == pytest.approx(0.2, abs=0.03)
    direct = [row["messages"] for row in rows if len(row["messages"]) == 2]
    right = sum(int(m[1]["content"]) == sum(operands(m[0]["content"])) for m in direct)
    assert right / len(direct) < 0.06


def test_the_warm_up_is_the_same_for_the_same_seed_and_differs_between_seeds():
    first, again, other = (list(sft_conversations(seed=seed, n=50)) for seed in (0, 0, 1))
    assert first == again != other


def test_conversations_name_the_tool_as_the_environment_does():
    (row,) = sft_conversations(n=1)
    assert [tool["function"]["name"] for tool in row["tools"]] == ["add"]


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (lambda a, b: [calls(("add", json.dumps({"a": a, "b": b}))), str(a + b)], 1.0),
        (lambda a, b: [calls(("add", json.dumps({"a": a, "b": b}))), str(a + b + 1)], 0.0),
        (lambda a, b: [str(a + b)], 1.0),
        (lambda a, b: ["dunno"], 0.0),
    ],
)
async def test_a_tool_sum_is_right_when_the_last_answer_is(scripted, policy, replies, reward):
    env = ToolSum()
    prompt = next(iter(env.tasks("train")))
    scripted(*replies(*operands(prompt.messages[0]["content"])))
    result = await env.run(prompt, policy, ctx())
    await env.aclose()
    assert (result.outcome, result.reward) == (Outcome.GRADED, reward)


def test_a_json_sum_shows_two_solved_sums_that_are_trained_on_and_not_its_own():
    for split in ("train", "heldout"):
        for prompt in JsonSum().tasks(split):
            *shown, own = (m["content"].split(" + ") for m in prompt.messages if m["role"] == "user")
            solved = [json.loads(m["content"])["answer"] for m in prompt.messages if m["role"] == "assistant"]
            assert solved == [int(a) + int(b) for a, b in shown]
            assert not any(is_heldout((int(a), int(b)), one_in=JsonSum.one_in) for a, b in shown)
            assert all(set(pair) != set(own) for pair in shown)
            assert prompt.task["label"] == int(own[0]) + int(own[1])


@pytest.mark.parametrize(
    ("text", "reward", "is_json"),
    [
        ('{"answer": 7}', 1, 1),
        ('{"answer":7}', 1, 1),
        ('{"answer": 8}', 0, 1),
        ('{"answer": "7"}', 0, 0),
        ('{"answer": 7} done', 0, 0),
        ("7", 0, 0),
    ],
)
async def test_a_json_sum_is_paid_for_form_and_value(scripted, policy, text, reward, is_json):
    env = JsonSum()
    prompt = next(p for p in env.tasks("train") if p.task["label"] == 7)
    scripted(text)
    result = await env.run(prompt, policy, ctx())
    await env.aclose()
    assert (result.reward, result.metrics["is_json"]) == (reward, is_json)
