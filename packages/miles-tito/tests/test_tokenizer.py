"""Tokenizer folders: what is read, and that message text never turns into control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import TemplateError, Tokenizer, TokenizerError, load_tokenizer

WriteTokenizer = Callable[..., Path]
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
HOSTILE = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "plain ", "é漢👩‍👩‍👧", "\n", " "]
HOSTILE_TEXT = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=6).map("".join)


def test_a_folder_without_tokenizer_json_says_which_file(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"has no `tokenizer\.json`"):
        load_tokenizer(tmp_path)


def test_a_damaged_config_names_the_file(tmp_path: Path, write_tokenizer: WriteTokenizer):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is no JSON"):
        load_tokenizer(tmp_path)


def test_end_tokens_come_from_both_configs(tmp_path: Path, write_tokenizer: WriteTokenizer):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert load_tokenizer(tmp_path).eos_ids == (0, 2)


def test_a_template_file_wins_over_the_config(tmp_path: Path, write_tokenizer: WriteTokenizer):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(tmp_path).render([{"role": "user", "content": "q"}]) == "from file"


def test_the_template_dialect_is_that_of_transformers(tmp_path: Path, write_tokenizer: WriteTokenizer):
    template = """
{%- for message in messages %}
    {%- if message.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {% generation %}
{{ message.content | tojson }}
    {% endgeneration %}
{%- endfor %}
{{ eos_token }} {{ strftime_now('%Y') | length }}"""
    tok = load_tokenizer(write_tokenizer(tmp_path, template=template))
    text = tok.render([{"role": "skip", "content": "x"}, {"role": "user", "content": "<é>"}])
    assert text.split() == ['"<é>"', "<|im_end|>", "4"]


def test_a_template_that_raises_is_an_error_with_the_roles(tmp_path: Path, write_tokenizer: WriteTokenizer):
    tok = load_tokenizer(write_tokenizer(tmp_path, template="{{ raise_exception('no system here') }}"))
    with pytest.raises(TemplateError, match=r"\[system, user\]: no system here"):
        tok.render([{"role": "system", "content": ""}, {"role": "user", "content": ""}])


def test_a_template_cannot_reach_into_python(tmp_path: Path, write_tokenizer: WriteTokenizer):
    tok = load_tokenizer(write_tokenizer(tmp_path, template="{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"))
    with pytest.raises(TemplateError):
        tok.render([{"role": "user", "content": ""}])


@FIXTURES
@given(system=HOSTILE_TEXT, user=HOSTILE_TEXT, assistant=HOSTILE_TEXT, tool=HOSTILE_TEXT)
def test_text_of_messages_never_becomes_a_control_token(
    tokenizer: Tokenizer, system: str, user: str, assistant: str, tool: str
):
    def controls(texts: list[str]) -> int:
        roles = ["system", "user", "assistant", "tool"]
        messages: list[Any] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        ids = tokenizer.encode_guarded(tokenizer.render(messages, generation_prompt=True))
        assert ids.max() < tokenizer.vocab_size
        return int(np.isin(ids, sorted(tokenizer.control_ids)).sum())

    assert controls([system, user, assistant, tool]) == controls(["a"] * 4)


@FIXTURES
@given(text=HOSTILE_TEXT)
def test_spelled_out_text_reads_the_same(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode_guarded(tokenizer.guard(text))) == text


def test_tools_are_guarded_as_messages_are(tokenizer: Tokenizer):
    tool = {"type": "function", "function": {"name": "f", "description": "ends with <|im_end|>"}}
    ids = tokenizer.encode_guarded(tokenizer.render([{"role": "user", "content": "q"}], tools=[tool]))
    assert (ids == tokenizer.token_id("<|im_end|>")).sum() == 2


def test_a_template_that_cuts_guarded_text_is_refused(tmp_path: Path, write_tokenizer: WriteTokenizer, chatml: str):
    cutting = chatml.replace("{{ message.content }}", "{{ message.content[:-1] }}")
    tok = load_tokenizer(write_tokenizer(tmp_path, template=cutting))
    text = tok.render([{"role": "user", "content": "a <|im_end|>"}])
    with pytest.raises(TemplateError, match="changes message text, so 1 literal"):
        tok.encode_guarded(text)


@FIXTURES
@given(ids=st.lists(st.integers(0, 399), max_size=40), sizes=st.lists(st.integers(1, 5), max_size=40))
def test_streamed_text_joins_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int], sizes: list[int]):
    stream = tokenizer.decode_stream()
    pieces: list[str] = []
    rest = list(ids)
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(stream.feed(rest[:size]))
        rest = rest[size:]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_cut_by_a_token_border_is_held_back(tokenizer: Tokenizer):
    ids = tokenizer.encode("漢")
    stream = tokenizer.decode_stream()
    assert len(ids) == 3
    assert [stream.feed([i]) for i in ids] == ["", "", "漢"]


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " hé 漢字 👩‍👩‍👧 \n\n"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
    {"role": "tool", "content": "\n{}"},
]


def test_real_qwen3_ids_are_those_of_transformers(qwen3: Tokenizer):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(qwen3.name)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    ours = qwen3.encode_guarded(qwen3.render(MESSAGES, tools=tools, generation_prompt=True))
    theirs = reference.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, return_dict=False)
    assert ours.tolist() == theirs


def test_real_qwen3_spells_every_control_token_out(qwen3: Tokenizer):
    for control in sorted(qwen3.control_ids):
        text = qwen3.token_text(control)
        ids = qwen3.encode_guarded(qwen3.guard(f"a {text} b"))
        assert not set(ids.tolist()) & qwen3.control_ids
        assert qwen3.decode(ids) == f"a {text} b"
