"""Ids sampled are ids trained: whatever was sampled, however a session branched, in every family."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import Session, Tokenizer, verify
from miles_tito.engine.generation import Generation, one_version
from miles_tito.records import FinishReason
from miles_tito.sessions.turn_selection import pick_all
from miles_tito.tokens.merge import Joiner, Setting
from miles_tito.tokens.messages import normalize
from miles_tito.tokens.supervised import supervised_trajectory
from models_at_hand import MODELS, joiner_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

REAL = [name for name, model in MODELS.items() if model.is_real]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "  \n", "\n\n", "👩‍👩‍👧", "漢字", "<|im_end|>", "<｜User｜>", "</think>", "\u202e\ufeff", "{}", "\t "]
)


class Branching:
    """A session that grows at random places, and all that was sampled in it."""

    def __init__(self, joiner: Joiner) -> None:
        self.joiner = joiner
        self.session = Session("s", joiner, max_context=2**30)
        self.histories: list[list[dict[str, Any]]] = [[]]
        self.sampled: list[np.ndarray] = []

    def grow(self, behind: int, text: str, ids: list[int], finish: FinishReason) -> None:
        """A reply of `ids` to a user message behind an earlier reply."""
        history = [*self.histories[behind % len(self.histories)], {"role": "user", "content": text}]
        plan = self.session.plan(normalize(history))
        turn = self.session.begin(plan, self.session.encode(plan), rid=f"r{len(self.sampled)}")
        completion = np.asarray(ids, np.int32)
        turn.reader.feed(completion)
        turn.reader.finish()
        node = self.session.commit(
            turn,
            Generation(
                output_ids=completion,
                logprobs=np.full(len(ids), -1.0, np.float32),
                versions=one_version(len(ids), 1),
                finish_reason=finish,
            ),
        )
        self.sampled.append(completion)
        self.histories.append([*history, node.message])


@pytest.mark.parametrize("name", [*REAL, "GLM-4.5", "Kimi-K2", "Mistral", "Inkling"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_sampled_id_is_trained_once_in_any_tree(name: str, data: st.DataObject):
    """Any ids at all: partial characters, control tokens in mid-reply, spellings that encoding would never give."""
    joiner = joiner_of(name)
    ids = st.lists(st.integers(0, joiner.tokenizer.vocab_size - 1), min_size=1, max_size=6)
    grown = Branching(joiner)
    for _ in range(data.draw(st.integers(1, 6))):
        end = data.draw(st.sampled_from([[], [joiner.end_ids[0]], [joiner.end_ids[-1]]]))
        finish = FinishReason.STOP if end else FinishReason.LENGTH
        grown.grow(data.draw(st.integers(0, 9)), data.draw(TEXTS), [*data.draw(ids), *end], finish)
    trajectories = grown.session.trajectories(pick_all)
    trained = np.concatenate([t.tokens[t.loss_mask] for t in trajectories])
    sampled = np.concatenate(grown.sampled)
    assert sorted(trained.tolist()) == sorted(sampled.tolist())
    for completion in grown.sampled:
        text = completion.tolist()
        assert any(
            text == t.tokens[at : at + len(text)].tolist() and t.loss_mask[at : at + len(text)].all()
            for t in trajectories
            for at in range(len(t.tokens) - len(text) + 1)
        )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), size=st.integers(0, 200))
def test_exact_joins_do_not_depend_on_the_merges(seed: int, size: int, chatml: str):
    """Vocabularies trained on noise: merges over line breaks, role names, spaces, and bytes of characters."""
    rng = random.Random(seed)
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rng.random() < 0.5)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=260 + size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in controls],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = ["user\n", "assistant\n", "\n\n", "\n", " ", "é漢", "so: ", "found ", "<think>\n", "tool_response>"]
    backend.train_from_iterator(["".join(rng.choices(pieces, k=40)) for _ in range(8)], trainer)
    tokenizer = Tokenizer(
        backend.to_str(), special_tokens={"eos_token": "<|im_end|>"}, template_sources={"default": chatml}
    )
    report = verify(tokenizer, family="tiny", seed=seed, conversations=4)
    assert report.ok, report.table()


DEMONSTRATION: list[dict[str, Any]] = [
    {"role": "user", "content": "one é漢"},
    {"role": "assistant", "content": "first reply", "reasoning_content": "hm"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second reply", "reasoning_content": "so"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "third reply", "reasoning_content": "ah"},
]


@pytest.mark.parametrize("name", MODELS)
def test_demonstrations_train_each_reply_and_its_end_and_nothing_else(name: str):
    joiner = joiner_of(name)
    trajectory = supervised_trajectory(joiner, DEMONSTRATION, id="d", setting=Setting())
    keep = joiner.tokenizer.control_ids
    edges = np.flatnonzero(np.diff(np.r_[0, trajectory.loss_mask.astype(np.int8), 0]))
    spans = [trajectory.tokens[start:end] for start, end in edges.reshape(-1, 2)]
    assert len(spans) == 3
    for span, word in zip(spans, ["first", "second", "third"], strict=True):
        assert f"{word} reply" in joiner.tokenizer.decode(span, keep=keep)
    masked = joiner.tokenizer.decode(trajectory.tokens[~trajectory.loss_mask], keep=keep)
    assert "reply" not in masked
    assert all(word in masked for word in ("one é漢", "two", "three"))
    ended = spans if joiner.close_id is not None else spans[:-1]  # nothing comes behind the last one
    assert all(int(span[-1]) in joiner.end_ids for span in ended)


def test_a_turn_that_ends_with_the_next_ones_opening_learns_it():
    """GLM samples the role that speaks next; where that is another role, both stand in the sequence."""
    joiner = joiner_of("GLM-4.5")
    user, observation = (joiner.tokenizer.token_id(token) for token in ("<|user|>", "<|observation|>"))
    grown = Branching(joiner)
    grown.grow(0, "q", [*joiner.tokenizer.encode("fine").tolist(), user or 0], FinishReason.STOP)
    grown.grow(1, "q", [*joiner.tokenizer.encode("good").tolist(), observation or 0], FinishReason.STOP)
    grown.grow(2, "q", [5, user or 0], FinishReason.STOP)
    (trajectory,) = grown.session.trajectories()
    roles = [int(i) for i in trajectory.tokens if i in (user, observation)]
    assert roles == [user, user, observation, user, user]
    trained = trajectory.tokens[trajectory.loss_mask]
    assert [int(i) for i in trained if i in (user, observation)] == [user, observation, user]


@pytest.mark.parametrize("name", ["Qwen3.6", "gpt-oss", "MiniMax-M2", "Llama-3.1"])
def test_a_truncated_turn_is_closed_by_a_masked_token(name: str):
    joiner = joiner_of(name)
    grown = Branching(joiner)
    cut = joiner.tokenizer.encode("a reply cut").tolist()
    grown.grow(0, "q", cut, FinishReason.LENGTH)
    grown.grow(1, "q", [*cut, joiner.end_ids[0]], FinishReason.STOP)
    (trajectory,) = grown.session.trajectories()
    at = int(trajectory.loss_mask.argmax()) + len(cut)
    assert trajectory.tokens[at] == joiner.close_id
    assert not trajectory.loss_mask[at]


def test_the_date_stays_that_of_the_sessions_beginning():
    """gpt-oss prints it; a session that runs over midnight keeps its prefix."""
    joiner = joiner_of("gpt-oss")
    session = Session("s", joiner, max_context=4096, now=datetime(2026, 12, 31, 23, 59))
    ids = session.encode(session.plan([{"role": "user", "content": "q"}]))
    assert "Current date: 2026-12-31" in joiner.tokenizer.decode(ids)


def test_other_tools_are_another_root():
    joiner = joiner_of("Kimi-K2")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    grown = Branching(joiner)
    grown.grow(0, "q", [5, joiner.end_ids[0]], FinishReason.STOP)
    history = normalize([*grown.histories[1], {"role": "user", "content": "q"}])
    assert grown.session.plan(history).match.node is not None
    assert grown.session.plan(history, tools=[tool]).match.node is None


TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}
CALLS = {
    "Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:3<|tool_call_argument_begin|>"
        '{"word":"ox"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "## Return of functions.look_up:3\ncattle",
    ),
    "gpt-oss": (
        '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "ox"}<|call|>',
        '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"cattle"<|end|><|start|>assistant',
    ),
    "GLM-4.5": (
        "\n<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>ox</arg_value>\n</tool_call><|observation|>",
        "\n<tool_response>\ncattle\n</tool_response><|assistant|>",
    ),
    "Inkling": (
        '<|message_model|>look_up<|content_invoke_tool_json|>{"name":"look_up","args":{"word":"ox"}}<|end_message|>'
        "<|content_model_end_sampling|>",
        "<|message_tool|>look_up<|content_text|>cattle<|end_message|>",
    ),
    "DeepSeek-V4": (
        'hm</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n'
        '<｜DSML｜parameter name="word" string="true">ox</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
        "<｜User｜><tool_result>cattle</tool_result><｜Assistant｜><think>",
    ),
}


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_tool_result_stands_behind_the_sampled_call_as_the_model_knows_it(name: str, renamed: bool):
    """Under the model's own name or id for the call, whatever id the client was given or gives."""
    joiner = joiner_of(name)
    sampled, result = CALLS[name]
    session = Session("s", joiner, max_context=4096)
    user = {"role": "user", "content": "What is an ox?"}
    plan = session.plan([user], tools=[TOOL])
    turn = session.begin(plan, session.encode(plan), rid="r0")
    ids = joiner.tokenizer.encode(sampled)
    turn.reader.feed(ids)
    turn.reader.finish()
    node = session.commit(
        turn,
        Generation(
            output_ids=ids,
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=one_version(len(ids), 1),
            finish_reason=FinishReason.STOP,
        ),
    )
    assert node.finish_reason is FinishReason.TOOL_CALLS
    (call,) = node.message["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": {"word": "ox"}}
    assert call["id"].startswith("call_")
    answer = {"role": "tool", "tool_call_id": "another" if renamed else call["id"], "content": "cattle"}
    plan = session.plan(normalize([user, node.message, answer]), tools=[TOOL])
    assert plan.match.node is node
    appended = joiner.tokenizer.decode(session.encode(plan), keep=joiner.tokenizer.control_ids)
    assert result in appended, appended
