"""Forced JSON and tool calls: what the engine is asked for, what comes back, and that it is not trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from miles_tito import Tokenizer
from miles_tito.errors import RequestError
from miles_tito.records import FinishReason
from miles_tito.testing import Reply, ScriptedEngine
from miles_tito.tokens.constrained_output import Form, structural_tag
from miles_tito.tokens.families import FAMILIES
from miles_tito.tokens.families.base import Family
from miles_tito.tokens.families.parser import TurnParser

OpenChat = Callable[..., Any]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {"type": "boolean"},
    },
    "required": ["path", "n", "deep"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "make_file")]
SCHEMAS = {"look": SCHEMA, "make_file": SCHEMA}
FORCED = [name for name, family in FAMILIES.items() if family.tool_call and family.tool_call.shape]
USER: Any = {"role": "user", "content": "q"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a", "n": 1, "deep": true}}\n</tool_call>'


class Grammar:
    """What an engine would let a model write: walks through the grammar of a structural tag at random."""

    def __init__(self, tag: str, marks: list[str], seed: int) -> None:
        import numpy as np

        xgrammar = pytest.importorskip("xgrammar")
        letters = [chr(code) for code in range(32, 127)]
        self._vocabulary = ["\n", *letters, *marks, "</s>"]
        self._random = np.random.default_rng(seed)
        info = xgrammar.TokenizerInfo(self._vocabulary, stop_token_ids=[len(self._vocabulary) - 1])
        self._matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
        self._mask = xgrammar.allocate_token_bitmask(1, len(self._vocabulary))

    def write(self) -> str:
        """A whole reply; marks come as soon as they may, so that free text ends."""
        import numpy as np

        text = ""
        while not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._mask)
            bits = self._mask.numpy().view(np.uint32)[0]
            allowed = [i for i in range(len(self._vocabulary)) if bits[i // 32] >> (i % 32) & 1]
            longest = [i for i in allowed if len(self._vocabulary[i]) > 1]
            choice = int(self._random.choice(longest if longest and self._random.random() < 0.5 else allowed))
            assert self._matcher.accept_token(choice)
            text += "" if choice == len(self._vocabulary) - 1 else self._vocabulary[choice]
            assert len(text) < 5000
        return text


def marks(family: Family) -> list[str]:
    return [*(family.reasoning or ()), "</parameter>", "</arg_value>"]


@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_whatever_the_grammar_of_a_forced_call_lets_through_is_read_as_calls_of_the_tools(
    name: str, in_reasoning: bool
):
    family = FAMILIES[name]
    in_reasoning = in_reasoning and family.reasoning is not None
    for seed in range(12):
        form = Form(param="tool_choice", names=("look",) if seed % 2 else (), one=bool(seed % 3))
        tag = structural_tag(form, family, SCHEMAS, in_reasoning=in_reasoning)
        text = Grammar(tag, marks(family), seed).write()
        parser = TurnParser(family, tools=True, in_reasoning=in_reasoning, schemas=SCHEMAS)
        parser.feed(text)
        parser.finish()
        reply = parser.message("c")
        calls = [call["function"] for call in reply.get("tool_calls", [])]
        assert calls, (text, reply)
        assert len(calls) == 1 or not form.one
        for call in calls:
            assert call["name"] in (form.names or SCHEMAS)
            assert set(call["arguments"]) == {"path", "n", "deep"}, text
            assert isinstance(call["arguments"]["n"], int)
            assert isinstance(call["arguments"]["deep"], bool)
        assert not reply["content"]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.channels])
def test_whatever_the_grammar_of_forced_json_lets_through_is_content_of_its_schema(name: str):
    family = FAMILIES[name]
    for seed in range(8):
        in_reasoning = seed % 2 == 1 and family.reasoning is not None
        tag = structural_tag(Form(param="f", schema=SCHEMA), family, {}, in_reasoning=in_reasoning)
        text = Grammar(tag, marks(family), seed).write()
        parser = TurnParser(family, tools=False, in_reasoning=in_reasoning)
        parser.feed(text)
        parser.finish()
        assert set(json.loads(parser.message("c")["content"])) == {"path", "n", "deep"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in FORCED])
def test_a_family_whose_calls_cannot_be_forced_says_so(name: str):
    with pytest.raises(RequestError, match=f"`tool_choice`: .*{name}.* forced"):
        structural_tag(Form(param="tool_choice"), FAMILIES[name], SCHEMAS, in_reasoning=False)


ASKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat, any": ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "look make_file"),
    "chat, named": (
        "chat/completions",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
        "look",
    ),
    "responses, any": (
        "responses",
        {"tools": [{"type": "function", **t["function"]} for t in TOOLS], "tool_choice": "required"},
        "look make_file",
    ),
    "responses, named": (
        "responses",
        {
            "tools": [{"type": "function", **t["function"]} for t in TOOLS],
            "tool_choice": {"type": "function", "name": "look"},
        },
        "look",
    ),
    "messages, any": (
        "messages",
        {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        "look",
    ),
    "messages, named": (
        "messages",
        {"tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "look"}},
        "look",
    ),
    "chat, json": ("chat/completions", {"response_format": {"type": "json_object"}}, '"type":"object"'),
    "chat, schema": (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        '"maxLength":5',
    ),
    "responses, schema": (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        '"maxLength":5',
    ),
    "messages, schema": (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        '"maxLength":5',
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ASKS)
async def test_each_dialect_forces_a_form(case: str, stream: bool, tokenizer: Tokenizer, open_chat: OpenChat):
    path, fields, held = ASKS[case]
    engine = ScriptedEngine([CALL if "tool_choice" in fields else "{}"], tokenizer=tokenizer)
    body: dict[str, Any] = {"stream": stream, **fields}
    body |= {"input": "q"} if path == "responses" else {"messages": [USER], "max_tokens": 90}
    async with open_chat(engine) as chat:
        answer = await chat.http.post(f"{chat.url}/{path}", json=body, headers=chat.auth)
        assert answer.status_code == 200, answer.text
        tree = (await chat.http.get(f"{chat.server}/sessions/s", headers=chat.auth)).json()
    tag = engine.requests[0].structural_tag
    assert tag
    assert json.loads(tag)["type"] == "structural_tag"
    if "tool_choice" in fields:
        assert [tag.count(f'"name\\": \\"{name}') for name in ("look", "make_file")] == [
            int(name in held.split()) for name in ("look", "make_file")
        ]
    else:
        assert held in tag
    assert [node["is_forced"] for node in tree["nodes"]] == [True]


async def test_a_forced_turn_stands_in_its_trajectory_and_is_not_trained(tokenizer: Tokenizer, open_chat: OpenChat):
    engine = ScriptedEngine([CALL, "done"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        first = await chat.reply([USER], tools=TOOLS, tool_choice="required")
        result = {"role": "tool", "content": "ok", "tool_call_id": first["tool_calls"][0]["id"]}
        before = (await chat.http.post(f"{chat.server}/sessions/s/samples", json={}, headers=chat.auth)).json()
        await chat.say([USER, first, result], tools=TOOLS)
        after = (await chat.http.post(f"{chat.server}/sessions/s/samples", json={}, headers=chat.auth)).json()
    assert before["samples"] == []
    assert [entry["why"].split(":")[0] for entry in before["dropped"]] == ["forced"]
    [sample] = after["samples"]
    trained = [token for token, is_trained in zip(sample["tokens"], sample["loss_mask"], strict=True) if is_trained]
    assert trained == [*tokenizer.encode("done").tolist(), tokenizer.eos_ids[0]]
    assert sample["tokens"][: len(engine.requests[1].input_ids)] == engine.requests[1].input_ids.tolist()
    assert [entry["node"] for entry in after["dropped"]] == [0]


async def test_an_engine_that_does_not_keep_to_a_form_is_an_error(tokenizer: Tokenizer, open_chat: OpenChat):
    async with open_chat(ScriptedEngine(["no", "no", "{", "so {"], tokenizer=tokenizer)) as chat:
        answers = [
            await chat.post([USER], tools=TOOLS, tool_choice="required"),
            await chat.post([USER], response_format={"type": "json_object"}),
            await chat.post([USER], response_format={"type": "json_object"}, max_tokens=1),
            await chat.post([USER], response_format={"type": "json_object"}, stop=["{"]),
        ]
        tree = (await chat.http.get(f"{chat.server}/sessions/s", headers=chat.auth)).json()
    assert [answer.status_code for answer in answers] == [502, 502, 200, 200], "what was cut off may be of any form"
    assert "`tool_choice` forces" in answers[0].json()["error"]["message"]
    assert (tree["num_turns"], tree["num_discarded"]) == (2, 2)


async def test_an_interrupted_forced_reply_begins_anew(tokenizer: Tokenizer, open_chat: OpenChat):
    ids = [*tokenizer.encode("{}").tolist(), tokenizer.eos_ids[0]]
    cut = Reply(ids=ids[:1], finish_reason=FinishReason.ABORT)
    engine = ScriptedEngine([cut, Reply(ids=ids)], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        reply = await chat.reply([USER], response_format={"type": "json_object"})
    assert reply["content"] == "{}"
    first, second = engine.requests
    assert second.input_ids.tolist() == first.input_ids.tolist()
    assert (first.rid, first.max_new_tokens) == (second.rid, second.max_new_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_of_everything_sampled_come_with_the_answer(
    stream: bool, tokenizer: Tokenizer, open_chat: OpenChat
):
    engine = ScriptedEngine(["é 漢"], tokenizer=tokenizer)
    async with open_chat(engine) as chat:
        answer = await chat.post([USER], logprobs=True, stream=stream)
        if stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            held = [event["choices"][0]["logprobs"] for event in events]
            assert held[:-1] == [None] * (len(held) - 1)
            rows = held[-1]["content"]
        else:
            rows = answer.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for row in rows for byte in row["bytes"]) == "é 漢<|im_end|>".encode()
    assert [row["logprob"] for row in rows] == [-1.0] * (len(tokenizer.encode("é 漢")) + 1)
    assert rows[-1]["token"] == "<|im_end|>"
