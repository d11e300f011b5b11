from __future__ import annotations

import asyncio
import math

import aiohttp
import pytest
from miles_envs import MultiTurn, RewardPool, SingleTurn, ToolLoop
from miles_envs.errors import EnvironmentSetupError, InfraError
from miles_tito.records import Env, Outcome, Prompt
from scripted_model import calls, completion, ctx, question, refusal


async def exact(prompt, messages):
    return float(messages[-1].get("content") == prompt.task["label"])


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def run(env, policy, *, prompt=None, context=None):
    try:
        return await env.run(prompt or question(), policy, context or ctx())
    finally:
        await env.aclose()


def single(reward=exact, **settings):
    return SingleTurn(prompts={"train": [question()]}, reward=reward, **settings)


def loop(**settings):
    return ToolLoop(**{"prompts": {"train": [question()]}, "tools": [add], "reward": exact, **settings})


ADD = calls(("add", '{"a": 2, "b": 2}'))


def test_shapes_are_environments():
    assert isinstance(single(), Env)
    assert isinstance(loop(), Env)


@pytest.mark.parametrize(("text", "reward"), [("4", 1.0), ("5", 0.0)])
async def test_a_single_turn_is_graded(scripted, policy, text, reward):
    scripted(text)
    result = await run(single(), policy)
    assert (result.outcome, result.reward, result.metrics) == (Outcome.GRADED, reward, {"turns": 1})


async def test_a_tools_result_goes_back_to_the_model(scripted, policy):
    model = scripted(ADD, "4")
    result = await run(loop(), policy)
    assert (result.outcome, result.reward) == (Outcome.GRADED, 1.0)
    assert result.metrics == {"turns": 2, "tool_calls": 1, "tool_errors": 0}
    assert model.requests[0]["tools"][0]["function"]["name"] == "add"
    first, second = (request["messages"] for request in model.requests)
    assert second[: len(first)] == first
    assert second[-1] == {"role": "tool", "tool_call_id": "call_0", "content": "4"}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("add", '{"a": 2}'), "error: bad arguments for add: Object missing required field `b`"),
        (("sub", "{}"), "error: there is no tool 'sub'; there is add"),
    ],
)
async def test_a_wrong_call_is_explained_to_the_model_which_may_mend_it(scripted, policy, call, error):
    model = scripted(calls(call), ADD, "4")
    result = await run(loop(), policy)
    assert model.requests[1]["messages"][-1]["content"] == error
    assert result.reward == 1.0
    assert result.metrics["tool_errors"] == 1


async def test_several_calls_of_one_turn_are_answered_in_order(scripted, policy):
    model = scripted(calls(("add", '{"a": 1, "b": 1}'), ("add", '{"a": 2, "b": 2}')), "4")
    await run(loop(), policy)
    assert [m["content"] for m in model.requests[1]["messages"][-2:]] == ["2", "4"]


async def test_a_long_result_is_cut_and_says_so(scripted, policy):
    def dump() -> str:
        """Dump."""
        return "x" * 50

    model = scripted(calls(("dump", "{}")), "4")
    await run(loop(tools=[dump], max_result_chars=10), policy)
    assert model.requests[1]["messages"][-1]["content"] == "x" * 10 + "\n[40 more characters cut]"


async def test_using_up_the_turns_is_graded_as_it_stands(scripted, policy):
    scripted(ADD, ADD)
    result = await run(loop(max_turns=2), policy)
    assert (result.outcome, result.reward, result.metrics["turns"]) == (Outcome.POLICY_LIMIT, 0.0, 2)


async def test_a_tools_result_never_passes_for_the_models_answer(scripted, policy):
    seen = []

    async def reward(prompt, messages):
        seen.append(messages[-1])
        return 0.0

    scripted(ADD)
    await run(loop(max_turns=1, reward=reward), policy)
    assert seen == [{"role": "assistant", **ADD}]


async def test_a_solved_example_in_the_prompt_never_passes_for_the_models_answer(scripted, policy):
    solved = ({"role": "user", "content": "1+3?"}, {"role": "assistant", "content": "4"})
    prompt = Prompt(id="p", messages=(*solved, {"role": "user", "content": "2+2?"}), task={"label": "4"})
    scripted(refusal(400, "too long", "context_length_exceeded"))
    result = await run(single("miles_envs.rewards:exact_match"), policy, prompt=prompt)
    assert (result.outcome, result.reward) == (Outcome.POLICY_LIMIT, 0.0)


async def test_answering_in_the_last_turn_is_no_limit(scripted, policy):
    scripted(ADD, "4")
    assert (await run(loop(max_turns=2), policy)).outcome is Outcome.GRADED


@pytest.mark.parametrize(
    "reply",
    [completion("4", finish_reason="length"), refusal(400, "too long", "context_length_exceeded")],
    ids=["turn too long", "context full"],
)
async def test_running_out_of_tokens_is_graded_as_it_stands(scripted, policy, reply):
    scripted(reply)
    result = await run(single(), policy)
    assert result.outcome is Outcome.POLICY_LIMIT
    assert result.reward is not None


async def test_running_out_of_time_is_graded_as_it_stands(scripted, policy):
    async def never(body):
        await asyncio.Event().wait()

    scripted(ADD, never)
    async with asyncio.timeout(30):
        result = await run(loop(), policy, context=ctx(seconds=0.3))
    assert (result.outcome, result.reward) == (Outcome.POLICY_LIMIT, 0.0)


async def test_an_episode_that_the_run_gives_up_ends_soon_and_without_reward(scripted, policy):
    context = ctx()

    async def give_up(body):
        context.cancelled.set()
        await asyncio.Event().wait()

    scripted(give_up)
    async with asyncio.timeout(30):
        result = await run(single(), policy, context=context)
    assert (result.outcome, result.reward) == (Outcome.CANCELLED, None)


async def test_a_session_closed_by_the_run_is_a_cancellation_not_a_failure(scripted, policy):
    context = ctx()

    def closed(body):
        context.cancelled.set()
        return refusal(401, "No session")

    scripted(closed)
    assert (await run(single(), policy, context=context)).outcome is Outcome.CANCELLED


@pytest.mark.parametrize("reply", [aiohttp.SocketTimeoutError("slow"), refusal(500, "engine died")])
async def test_a_broken_engine_is_never_a_reward(scripted, policy, reply):
    scripted(reply)
    result = await run(single(), policy)
    assert (result.outcome, result.reward) == (Outcome.INFRA_ABORT, None)
    assert "session/v1" in result.error


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "None"),
        (math.nan, "nan"),
        ({"score": 1}, "without 'reward'"),
        (ValueError("no label"), "ValueError: no label"),
    ],
)
async def test_a_grader_that_gives_no_number_is_never_a_reward(scripted, policy, value, reason):
    async def reward(prompt, messages):
        if isinstance(value, Exception):
            raise value
        return value

    scripted("4")
    result = await run(single(reward), policy)
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_INVALID, None)
    assert "episode g0/3 of prompt p" in result.error
    assert reason in result.error


async def test_one_failing_reward_of_many_leaves_the_others_alone(scripted, policy):
    async def reward(prompt, messages):
        if prompt.id == "p3":
            raise RuntimeError("grader broke")
        return 1.0

    scripted(*["4"] * 6)
    env = single(reward)
    results = await asyncio.gather(*(env.run(question(id=f"p{i}"), policy, ctx()) for i in range(6)))
    await env.aclose()
    assert [result.outcome for result in results].count(Outcome.GRADED) == 5
    assert results[3].outcome is Outcome.VERIFIER_INVALID


async def test_a_hung_plain_reward_ends_its_episode_and_no_other(scripted, policy):
    scripted("hang", "0.5")
    pool = RewardPool(num_workers=1)
    env = single("grader_functions:by_text", pool=pool, reward_timeout_s=0.5)
    results = [await env.run(question(), policy, ctx()) for _ in range(2)]
    await env.aclose()
    await pool.aclose()
    assert [result.outcome for result in results] == [Outcome.VERIFIER_INVALID, Outcome.GRADED]
    assert results[1].reward == 0.5


async def test_metrics_of_the_reward_join_those_of_the_episode(scripted, policy):
    async def reward(prompt, messages):
        return {"reward": 1, "style": 0.5, "skipped": None}

    scripted("4")
    assert (await run(single(reward), policy)).metrics == {"turns": 1, "style": 0.5}


class Guess(MultiTurn):
    """The model guesses a number; the environment says higher or lower."""

    async def begin(self, dialogue):
        dialogue.state = ["begun"]

    async def reply(self, dialogue):
        guess, number = int(dialogue.messages[-1]["content"]), dialogue.prompt.task["label"]
        if guess == number:
            return []
        if guess < 0:
            raise InfraError("the board fell off the table")
        return [{"role": "user", "content": "higher" if guess < number else "lower"}]

    async def end(self, dialogue):
        dialogue.state.append("ended")
        self.states = [*getattr(self, "states", []), dialogue.state]


async def last_guess(prompt, messages):
    guesses = [m["content"] for m in messages if m["role"] == "assistant"]
    return float(guesses[-1] == str(prompt.task["label"]))


@pytest.mark.parametrize(
    ("guesses", "outcome", "reward"),
    [
        (["5", "9", "7"], Outcome.GRADED, 1.0),
        (["1", "2", "3"], Outcome.POLICY_LIMIT, 0.0),
        (["1", "-1"], Outcome.INFRA_ABORT, None),
    ],
)
async def test_an_environment_of_ones_own_writes_only_its_replies(scripted, policy, guesses, outcome, reward):
    model = scripted(*guesses)
    env = Guess(prompts={"train": []}, reward=last_guess, max_turns=3)
    result = await run(env, policy, prompt=question("Guess!", label=7))
    assert (result.outcome, result.reward) == (outcome, reward)
    assert model.requests[1]["messages"][-1]["content"] == "higher"
    assert env.states == [["begun", "ended"]]


async def test_the_end_is_told_to_an_environment_whose_task_is_cancelled(scripted, policy):
    started = asyncio.Event()

    async def never(body):
        started.set()
        await asyncio.Event().wait()

    scripted(never)
    env = Guess(prompts={"train": []}, reward=last_guess, max_turns=3)
    task = asyncio.create_task(env.run(question(), policy, ctx()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.states == [["begun", "ended"]]
    await env.aclose()


def test_splits_come_from_lists_functions_and_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    prompts = {"train": f"{path}@[:1]", "heldout": lambda: [question(id="h")], "test": [question(id="t")]}
    env = SingleTurn(prompts=prompts, reward=exact)
    assert [[p.id for p in env.tasks(split)] for split in prompts] == [["rows-0"], ["h"], ["t"]]
    with pytest.raises(EnvironmentSetupError, match="no split 'dev'; this environment has 'train', 'heldout', 'test'"):
        env.tasks("dev")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loop(max_turns=0), "`max_turns` is 0"),
        (lambda: loop(tools=[]), "`tools` is empty"),
        (lambda: SingleTurn(prompts=[question()], reward=exact), "`prompts` is a list; name the splits"),
        (lambda: single("nowhere:reward"), "there is no module 'nowhere'"),
    ],
)
def test_a_wrong_definition_is_refused_when_it_is_made(make, message):
    with pytest.raises(EnvironmentSetupError, match=message):
        make()


async def test_a_prompt_without_messages_is_refused(policy):
    with pytest.raises(EnvironmentSetupError, match="Prompt x has no messages"):
        await run(single(), policy, prompt=Prompt(id="x"))


async def test_a_closed_environment_may_be_used_again(scripted, policy):
    scripted("4", "4")
    env = single()
    assert (await run(env, policy)).reward == (await run(env, policy)).reward == 1.0
