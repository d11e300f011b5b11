"""Sampled text to messages, and templates that can or cannot be joined."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from miles_tito import TemplateError, Tokenizer, load_tokenizer, probe_template
from miles_tito.tokens.families import FAMILIES
from miles_tito.tokens.families.calls import HERMES
from miles_tito.tokens.families.parser import ToolCall, TurnParser
from miles_tito.tokens.family_choice import choose_family

QWEN3 = FAMILIES["qwen3"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parse(text: str, *, tools: bool = True, in_reasoning: bool = False, sizes: list[int] | None = None) -> Any:
    parser = TurnParser(QWEN3, tools=tools, in_reasoning=in_reasoning)
    for size in sizes or [len(text)]:
        parser.feed(text[:size])
        text = text[size:]
    parser.feed(text)
    parser.finish()
    return parser.message("c")


def called(message: Any) -> list[Any]:
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_reasoning_content_and_calls_come_apart():
    message = parse(f"<think>\nlet me see\n</think>\n\nSure.\n{CALL}\n{CALL}")
    assert message["reasoning_content"] == "let me see"
    assert message["content"] == "Sure."
    assert called(message) == [("c_0", "f", {"a": 1}), ("c_1", "f", {"a": 1})]


def test_plain_text_stays_as_it_was_sampled():
    assert parse(" {}\n ") == {"role": "assistant", "content": " {}\n "}


def test_reasoning_cut_by_the_budget_is_no_content():
    assert parse("<think>\nhm, 3 and") == {"role": "assistant", "content": "", "reasoning_content": "hm, 3 and"}


def test_reasoning_that_the_prompt_opened_ends_at_its_mark():
    message = parse("hm\n</think>\n\nyes", in_reasoning=True)
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_without_a_list_of_tools_a_call_is_text():
    assert parse(CALL, tools=False)["content"] == CALL


@pytest.mark.parametrize(
    "body",
    [
        "{not json}",
        '["f", {}]',
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {}} extra',
        '{"name": "f", "args": {}}',
        "",
    ],
)
def test_a_malformed_call_stays_text(body: str):
    text = f"so \n<tool_call>{body}</tool_call>\nafter"
    assert parse(text) == {"role": "assistant", "content": text}


def test_an_unfinished_call_stays_text():
    text = 'so\n<tool_call>\n{"name": "f"'
    assert parse(text) == {"role": "assistant", "content": text}


def test_a_good_call_behind_a_bad_one_is_found():
    message = parse(f"<tool_call>oops</tool_call>{CALL}")
    assert message["content"] == "<tool_call>oops</tool_call>"
    assert called(message) == [("c_0", "f", {"a": 1})]


PIECES = [
    "<think>",
    "</think>",
    "\n",
    " ",
    "text",
    "<",
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    '{"name": "g"}',
    "<tool_call>{</tool_call>",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(st.integers(1, 7), max_size=30))
def test_a_turn_reads_the_same_in_any_pieces(text: str, sizes: list[int]):
    assert parse(text, sizes=sizes) == parse(text)


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(st.integers(1, 7), max_size=30))
def test_streamed_pieces_add_up_to_the_message(text: str, sizes: list[int]):
    parser = TurnParser(QWEN3, tools=True)
    pieces: list[Any] = []
    rest = text
    for size in [*sizes, len(text) + 1]:
        pieces += parser.feed(rest[:size])
        rest = rest[size:]
    pieces += parser.finish()
    message = parse(text)
    texts = [piece for piece in pieces if not isinstance(piece, ToolCall)]
    assert "".join(p.text for p in texts if p.kind == "content") == message["content"]
    assert "".join(p.text for p in texts if p.kind == "reasoning") == message.get("reasoning_content", "")
    calls = [(piece.name, json.loads(piece.arguments_json)) for piece in pieces if isinstance(piece, ToolCall)]
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]


def problems(tok: Tokenizer) -> list[tuple[str, str]]:
    return [(finding.case, finding.level) for finding in probe_template(tok) if finding.level != "ok"]


def test_the_small_template_proves_append_only(tokenizer: Tokenizer):
    assert problems(tokenizer) == []
    family = choose_family("auto", tokenizer)
    assert (family.close, family.reasoning, family.tool_call) == ("<|im_end|>", ("<think>", "</think>"), HERMES)


def test_real_qwen3_proves_append_only_and_warns_about_its_reasoning(qwen3: Tokenizer):
    assert problems(qwen3) == [("earlier reasoning", "warning")]
    assert choose_family("auto", qwen3).close == "<|im_end|>"


WriteTokenizer = Callable[..., Path]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_smollm2s_template_proves_append_only_without_tools(tmp_path: Path, write_tokenizer: WriteTokenizer):
    tok = load_tokenizer(write_tokenizer(tmp_path, template=SMOLLM2))
    assert problems(tok) == [("tools", "warning")]
    assert choose_family("auto", tok).tool_call is None


BROKEN = {
    "forgets earlier replies": (
        "{{ message.content }}",
        "{{ message.content if loop.last or message.role != 'assistant' else '' }}",
        "no token of its own",
    ),
    "numbers the messages": (
        "{{ '<|im_start|>' ~ role",
        "{{ loop.index if role == 'user' and not loop.first else '' }}{{ '<|im_start|>' ~ role",
        "not written alike in context",
    ),
    "rewrites what came before": (
        "{{ '<|im_start|>' ~ role",
        "{{ '!' if loop.first and loop.length > 2 else '' }}{{ '<|im_start|>' ~ role",
        "rewritten",
    ),
    "ends a turn with plain text": ("{{ '<|im_end|>\n' }}", "{{ '[END]\n' }}", "no token of its own"),
    "drops tool results": (
        "{%- if loop.first and tools",
        "{%- if message.role == 'tool' %}{% continue %}{% endif %}{%- if loop.first and tools",
        "role tool",
    ),
}


@pytest.mark.parametrize("habit", BROKEN)
def test_auto_refuses_a_template_that(habit: str, tmp_path: Path, write_tokenizer: WriteTokenizer, chatml: str):
    old, new, why = BROKEN[habit]
    assert old in chatml
    tok = load_tokenizer(write_tokenizer(tmp_path, template=chatml.replace(old, new)))
    with pytest.raises(TemplateError, match="cannot prove exact joins"):
        choose_family("auto", tok)
    assert any(why in finding.message for finding in probe_template(tok) if finding.level == "error")


def test_an_unknown_family_is_refused_with_those_known(tokenizer: Tokenizer):
    with pytest.raises(TemplateError, match=r"'qwen2'; known: auto, .*qwen3, .*smollm2, tiny"):
        choose_family("qwen2", tokenizer)
