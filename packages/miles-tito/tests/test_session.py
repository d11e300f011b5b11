"""Sessions: sampled ids are trained ids, whatever clients replay and engines do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import (
    Episode,
    FinishReason,
    Outcome,
    RequestError,
    SampleError,
    Sampling,
    Session,
    TemplateError,
    Tokenizer,
    TrajectoryKind,
    VersionSpan,
    load_tokenizer,
    to_samples,
)
from miles_tito.engine.generation import Generation, one_version
from miles_tito.sessions.tree import Node
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
Messages = list[dict[str, Any]]


class Talk:
    """A session and what was sampled in it."""

    def __init__(self, tok: Tokenizer, *, family: str = "auto", **options: Any) -> None:
        self.tok = tok
        self.session = Session("s", Joiner(tok, choose_family(family, tok)), **{"max_context": 100_000, **options})
        self.sampled: list[list[int]] = []

    @property
    def all_sampled(self) -> list[int]:
        return [token for ids in self.sampled for token in ids]

    def begin(self, messages: Messages, **options: Any):
        plan = self.session.plan(
            normalize(messages), tools=options.pop("tools", ()), variables=options.pop("variables", None)
        )
        return self.session.begin(plan, self.session.encode(plan), rid=f"r{len(self.sampled)}", **options)

    def finish(
        self,
        turn: Any,
        sampled: str | Sequence[int],
        *,
        finish: FinishReason = FinishReason.STOP,
        version: int = 0,
    ) -> Node:
        if isinstance(sampled, str):
            sampled = [*self.tok.encode(sampled).tolist(), *([self.tok.eos_ids[0]] if finish == "stop" else [])]
        ids = np.asarray(sampled, np.int32)
        self.sampled.append(ids.tolist())
        turn.reader.feed(ids)
        turn.reader.finish()
        return self.session.commit(
            turn,
            Generation(
                output_ids=ids,
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=one_version(len(ids), version),
                finish_reason=finish,
            ),
        )

    def turn(self, messages: Messages, sampled: str | Sequence[int], **options: Any) -> dict[str, Any]:
        """One whole turn; the reply as an OpenAI client would replay it."""
        how = {key: options.pop(key) for key in ("finish", "version") if key in options}
        reply = self.finish(self.begin(messages, **options), sampled, **how).message
        if "tool_calls" in reply:
            calls = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in reply["tool_calls"]
            ]
            return {**reply, "tool_calls": calls}
        return dict(reply)

    def text(self, n: int = 0) -> str:
        ids = self.session.trajectories()[n].tokens
        return self.tok.decode(ids, keep=self.tok.control_ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_two_turn_chat_is_one_trajectory_with_exact_ids(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("more")]
    talk.turn(messages, "two", version=3)
    [trajectory] = talk.session.trajectories()
    assert talk.text() == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\none<|im_end|>"
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert trajectory.tokens[trajectory.loss_mask].tolist() == talk.all_sampled
    assert (trajectory.logprobs == np.where(trajectory.loss_mask, -0.5, 0)).all()
    first, second = trajectory.versions
    assert (first.version, second.version) == (0, 3)
    assert trajectory.tokens[first.start : first.end].tolist() == talk.sampled[0]
    assert trajectory.tokens[second.start : second.end].tolist() == talk.sampled[1]
    assert (trajectory.id, trajectory.kind, trajectory.parent_id) == ("s:0", TrajectoryKind.MAIN, None)


def test_a_sample_that_no_encoder_would_produce_is_kept_verbatim(tokenizer: Tokenizer):
    spelled = [int(i) for letter in "answer" for i in tokenizer.encode(letter)]
    assert spelled != tokenizer.encode("answer").tolist()
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, [*spelled, tokenizer.eos_ids[0]]), user("more")]
    talk.turn(messages, "two")
    [trajectory] = talk.session.trajectories()
    assert trajectory.tokens[trajectory.loss_mask].tolist()[: len(spelled)] == spelled


BODY = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "é漢👩‍👩‍👧", "  \n", "</think>", "<tool_call>{}"])


def check_random_conversation(tok: Tokenizer, family: str, data: st.DataObject) -> None:
    """Ids sampled = ids trained, and replies are found again, over random bodies and random sampled ids."""
    talk = Talk(tok, family=family, sampling=Sampling(max_tokens=64))
    messages: Messages = [user(data.draw(BODY))]
    for _ in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=8))
        stopped = data.draw(st.booleans())
        reply = talk.turn(
            messages,
            [*ids, tok.eos_ids[0]] if stopped else ids,
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )
        appended = data.draw(
            st.lists(
                st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), BODY),
                min_size=1,
                max_size=3,
            )
        )
        messages += [reply, *appended]
    [trajectory] = talk.session.trajectories()
    assert trajectory.tokens[trajectory.loss_mask].tolist() == talk.all_sampled
    assert trajectory.metadata["num_turns"] == len(talk.sampled)
    covered = sorted((span.start, span.end) for span in trajectory.versions)
    trained = [ids for ids in talk.sampled if ids]
    assert [trajectory.tokens[start:end].tolist() for start, end in covered] == trained


@FIXTURES
@given(st.data())
def test_any_conversation_trains_exactly_what_was_sampled(tokenizer: Tokenizer, data: st.DataObject):
    check_random_conversation(tokenizer, "tiny", data)


@settings(FIXTURES, max_examples=25)
@given(st.data())
def test_any_conversation_with_real_qwen3_trains_exactly_what_was_sampled(qwen3: Tokenizer, data: st.DataObject):
    check_random_conversation(qwen3, "qwen3", data)


def test_a_tool_turn_with_real_qwen3_equals_the_templates_own_rendering(qwen3: Tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    talk = Talk(qwen3)
    messages: Messages = [{"role": "system", "content": "be brief"}, user("3+4?")]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    reply = talk.turn(messages, call, tools=tools)
    assert reply["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3, "b": 4}'}
    messages += [reply, {"role": "tool", "tool_call_id": "x", "content": "7"}, {"role": "tool", "content": "seven"}]
    talk.turn(messages, "7", tools=tools)
    rendered = qwen3.render(normalize(messages), tools=tools, generation_prompt=True)
    assert talk.text() == rendered + "7<|im_end|>"
    assert np.array_equal(talk.session.trajectories()[0].tokens[:-2], qwen3.encode(rendered))


def test_a_truncated_turn_gets_a_close_token_that_is_not_trained(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one", finish=FinishReason.LENGTH), user("go on")]
    talk.turn(messages, "two")
    assert "assistant\none<|im_end|>\n<|im_start|>user\ngo on" in talk.text()
    [trajectory] = talk.session.trajectories()
    closes = np.flatnonzero(trajectory.tokens == tokenizer.eos_ids[0])
    assert trajectory.loss_mask[closes].tolist() == [False, False, False, True]


def test_the_sampled_stop_token_is_trained_and_not_doubled(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("go on")]
    talk.turn(messages, "two")
    [trajectory] = talk.session.trajectories()
    closes = np.flatnonzero(trajectory.tokens == tokenizer.eos_ids[0])
    assert trajectory.loss_mask[closes].tolist() == [False, True, False, True]


CALLS = (
    '<think>\nadd them\n</think>\n\nSure\n<tool_call>\n{"name": "f", "arguments": {"b": 1.0, "a": "é"}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def rewrite_arguments(reply: dict[str, Any], text: str) -> dict[str, Any]:
    call = reply["tool_calls"][0]
    return {**reply, "tool_calls": [{**call, "function": {**call["function"], "arguments": text}}]}


REPLAYS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as it was": lambda reply: reply,
    "with compact arguments": lambda reply: rewrite_arguments(reply, '{"a":"é","b":1}'),
    "with escaped arguments": lambda reply: rewrite_arguments(reply, '{ "b": 1.0, "a": "\\u00e9" }'),
    "with other call ids": lambda reply: {**reply, "tool_calls": [{**reply["tool_calls"][0], "id": "mine"}]},
    "with content in parts": lambda reply: {**reply, "content": [{"type": "text", "text": "Sure"}]},
    "with whitespace around the content": lambda reply: {**reply, "content": "Sure \n"},
    "with trimmed reasoning": lambda reply: {**reply, "reasoning_content": "add them\n"},
    "with reasoning under its other name": lambda reply: {
        **{k: v for k, v in reply.items() if k != "reasoning_content"},
        "reasoning": "add them",
    },
    "without reasoning": lambda reply: {k: v for k, v in reply.items() if k != "reasoning_content"},
    "with reasoning inside the content": lambda reply: {
        "role": "assistant",
        "tool_calls": reply["tool_calls"],
        "content": "<think>\nadd them\n</think>\n\nSure",
    },
    "with empty extras": lambda reply: {**reply, "refusal": None, "annotations": [], "audio": None},
    "with cache control": lambda reply: {**reply, "cache_control": {"type": "ephemeral"}},
}


@pytest.mark.parametrize("how", REPLAYS)
def test_a_reply_is_found_again_when_replayed(how: str, tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    reply = talk.turn(messages, CALLS, tools=TOOLS)
    assert reply["reasoning_content"] == "add them"
    messages += [REPLAYS[how](reply), {"role": "tool", "content": "2"}]
    talk.turn(messages, "two", tools=TOOLS)
    [trajectory] = talk.session.trajectories()
    assert trajectory.tokens[trajectory.loss_mask].tolist() == talk.all_sampled


EDITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "other content": lambda reply: {**reply, "content": "Sure!"},
    "other arguments": lambda reply: rewrite_arguments(reply, '{"a": "é", "b": 2}'),
    "other reasoning": lambda reply: {**reply, "reasoning_content": "no"},
    "no call": lambda reply: {"role": "assistant", "content": "Sure"},
}


@pytest.mark.parametrize("how", EDITS)
def test_a_reply_that_the_client_edited_makes_a_labelled_branch(how: str, tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    reply = talk.turn(messages, CALLS, tools=TOOLS)
    talk.turn([*messages, EDITS[how](reply), user("more")], "two", tools=TOOLS)
    first, second = talk.session.trajectories()
    assert first.tokens[first.loss_mask].tolist() == talk.sampled[0]
    assert second.tokens[second.loss_mask].tolist() == talk.sampled[1]
    assert (second.id, second.kind, second.parent_id) == ("s:1", TrajectoryKind.FORK, None)


def test_a_second_reply_forks_and_the_shared_turn_trains_once(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("more")]
    for turn, text in zip([talk.begin(messages), talk.begin(messages)], ["two", "three"], strict=True):
        talk.finish(turn, text)
    first, second = talk.session.trajectories()
    assert first.tokens[first.loss_mask].tolist() == talk.sampled[0] + talk.sampled[1]
    assert second.tokens[second.loss_mask].tolist() == talk.sampled[2]
    assert np.array_equal(second.tokens[: len(first.tokens) - 4], first.tokens[:-4])
    assert (first.kind, second.kind, second.parent_id) == (TrajectoryKind.MAIN, TrajectoryKind.FORK, "s:0")
    assert len(second.versions) == 2, "the shared turn keeps its version although it is not trained twice"


def test_equal_replies_at_one_time_are_both_recorded_and_each_goes_on(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    turns = [talk.begin([user("q")]), talk.begin([user("q")])]
    for turn in turns:
        talk.finish(turn, "same")
    messages = [user("q"), {"role": "assistant", "content": "same"}]
    talk.turn([*messages, user("a")], "x")
    talk.turn([*messages, user("b")], "y")
    trajectories = talk.session.trajectories()
    assert sorted(t.metadata["num_turns"] for t in trajectories) == [2, 2]
    assert sum(t.num_loss_tokens for t in trajectories) == sum(map(len, talk.sampled))


def test_twin_replies_with_calls_are_told_apart_by_their_call_ids(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    first = talk.turn([user("q")], CALLS, tools=TOOLS)
    talk.turn([user("q")], CALLS, tools=TOOLS)
    talk.turn([user("q"), first, {"role": "tool", "content": "2"}], "two", tools=TOOLS)
    assert [t.metadata["num_turns"] for t in talk.session.trajectories()] == [2, 1]


def test_a_changed_list_of_tools_is_a_new_root(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one", tools=TOOLS), user("more")]
    talk.turn(messages, "two")
    first, second = talk.session.trajectories()
    assert second.parent_id is None
    assert second.kind is TrajectoryKind.FORK
    assert second.tokens[second.loss_mask].tolist() == talk.sampled[1], "the carried reply is masked"
    assert first.num_loss_tokens == len(talk.sampled[0])


def test_a_turn_given_up_leaves_nothing_but_a_count(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("more")]
    before = talk.session.trajectories()
    talk.session.discard(talk.begin(messages))
    assert talk.session.discarded == 1
    assert [t.tokens.tolist() for t in talk.session.trajectories()] == [t.tokens.tolist() for t in before]
    talk.turn(messages, "two")
    assert [t.kind for t in talk.session.trajectories()] == [TrajectoryKind.MAIN]


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers_and_changes_nothing(tokenizer: Tokenizer):
    talk = Talk(tokenizer, max_context=40)
    with pytest.raises(RequestError, match="maximum context length is 40 tokens, and the messages take") as caught:
        talk.begin([user("word " * 40)])
    assert caught.value.code == "context_length_exceeded"
    assert talk.session.describe()["nodes"] == []


def test_the_budget_is_the_least_of_session_request_and_room(tokenizer: Tokenizer):
    talk = Talk(tokenizer, max_context=60, sampling=Sampling(max_tokens=30))
    assert talk.begin([user("q")]).request.max_new_tokens == 30
    assert talk.begin([user("q")], max_tokens=7).request.max_new_tokens == 7
    long = talk.begin([user("q" * 30)]).request
    assert long.max_new_tokens == 60 - len(long.input_ids) < 30


def test_a_stop_string_is_cut_from_the_reply_but_its_tokens_are_trained(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    turn = talk.begin(messages, stop=["STOP"])
    assert turn.request.stop == ("STOP",)
    ids = tokenizer.encode("done STOP").tolist()
    reply = talk.finish(turn, ids).message
    assert reply["content"] == "done "
    talk.turn([*messages, reply, user("more")], "two")
    [trajectory] = talk.session.trajectories()
    assert trajectory.tokens[trajectory.loss_mask].tolist() == ids + talk.sampled[1]
    assert "done STOP<|im_end|>\n<|im_start|>user\nmore" in talk.text()


@pytest.mark.parametrize(("asked", "recorded"), [(0.6, 0.6), (0.0, 1.0)])
def test_the_temperature_of_the_log_probs_is_recorded(asked: float, recorded: float, tokenizer: Tokenizer):
    talk = Talk(tokenizer, sampling=Sampling(temperature=asked))
    talk.turn([user("q")], "one")
    assert talk.session.trajectories()[0].temperature == recorded


def test_versions_of_one_turn_stay_where_they_were_sampled(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    turn = talk.begin([user("q")])
    spans = (VersionSpan(start=0, end=2, version=4), VersionSpan(start=2, end=3, version=5))
    talk.session.commit(
        turn,
        Generation(
            output_ids=np.array([10, 11, 2]), logprobs=np.zeros(3), versions=spans, finish_reason=FinishReason.STOP
        ),
    )
    [trajectory] = talk.session.trajectories()
    start = len(turn.request.input_ids)
    assert [(s.start - start, s.end - start, s.version) for s in trajectory.versions] == [(0, 2, 4), (2, 3, 5)]
    assert trajectory.oldest_version == 4


def test_memory_grows_with_tokens_not_with_turns_times_tokens(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    messages = [user("q")]
    for _ in range(50):
        messages += [talk.turn(messages, "word " * 20), user("more")]
    [trajectory] = talk.session.trajectories()
    arrays = [
        array
        for path in talk.session.pick().paths
        for node in path
        for array in (node.prompt_ids, node.completion_ids, node.logprobs)
    ]
    held = sum(array.nbytes if array.base is None else array.base.nbytes for array in arrays)
    assert held <= 16 * len(trajectory.tokens)


def test_thinking_can_be_switched_off_for_real_qwen3(qwen3: Tokenizer):
    talk = Talk(qwen3, family="qwen3")
    talk.turn([user("q")], "yes", variables={"enable_thinking": False})
    assert talk.text().endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>")


def test_tools_that_a_template_would_ignore_are_refused(tmp_path: Path, write_tokenizer: Any):
    plain = "{% for m in messages %}<|im_start|>{{ m.role ~ '\n' ~ m.content }}<|im_end|>\n{% endfor %}"
    tail = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tok = load_tokenizer(write_tokenizer(tmp_path, template=plain + tail))
    talk = Talk(tok, family="smollm2")
    with pytest.raises(RequestError, match="ignores `tools`"):
        talk.begin([user("q")], tools=TOOLS)
    call = {"function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(RequestError, match="drops the `tool_calls`"):
        talk.begin([user("q"), {"role": "assistant", "tool_calls": [call]}, user("r")])


def test_a_family_that_does_not_fit_the_tokenizer_is_refused(tmp_path: Path, write_tokenizer: Any, chatml: str):
    tok = load_tokenizer(write_tokenizer(tmp_path, template=chatml))
    tok._added.pop("<|im_end|>")
    with pytest.raises(TemplateError, match="no added token"):
        Joiner(tok, choose_family("qwen3", tok))


def episode(talk: Talk, **changes: Any) -> Episode:
    fields: dict[str, Any] = {
        "id": "e",
        "prompt_id": "p",
        "group_id": "g",
        "outcome": Outcome.GRADED,
        "reward": 1.0,
        "trajectories": talk.session.trajectories(),
    }
    return Episode(**{**fields, **changes})


def test_samples_share_the_loss_tokens_of_their_episode(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    for turn, text in zip([talk.begin([user("q")]), talk.begin([user("q")])], ["one", "two two"], strict=True):
        talk.finish(turn, text)
    rows = to_samples(episode(talk), 0.5)
    assert [row.id for row in rows] == ["s:0", "s:1"]
    assert {row.loss_denominator for row in rows} == {sum(map(len, talk.sampled))}
    assert {row.advantage for row in rows} == {0.5}
    assert {(row.episode_id, row.group_id, row.prompt_id, row.reward) for row in rows} == {("e", "g", "p", 1.0)}


def test_advantages_may_come_per_token(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    talk.turn([user("q")], "one")
    length = len(talk.session.trajectories()[0].tokens)
    [row] = to_samples(episode(talk), {"s:0": np.arange(length, dtype=np.float32)})
    assert np.asarray(row.advantage).tolist() == list(range(length))
    with pytest.raises(SampleError, match="but not s:0 of episode e"):
        to_samples(episode(talk), {})


def test_an_episode_without_reward_is_no_training_data(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    talk.turn([user("q")], "one")
    with pytest.raises(SampleError, match=r"ended as infra_abort \(boom\)"):
        to_samples(episode(talk, outcome=Outcome.INFRA_ABORT, reward=None, error="boom"), 0.0)


def test_a_trajectory_without_a_trained_token_makes_no_sample(tokenizer: Tokenizer):
    talk = Talk(tokenizer)
    talk.turn([user("q")], [], finish=FinishReason.LENGTH)
    assert to_samples(episode(talk), 0.5) == []


@pytest.mark.parametrize("session_id", ["", "a/b", ".hidden", "x" * 201, "a b"])
def test_a_session_id_that_no_path_can_carry_is_refused(session_id: str, tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="must be 1 to 200 letters"):
        Session(session_id, Joiner(tokenizer, choose_family("auto", tokenizer)), max_context=9)
