from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_train.models.tiny import build_tiny
from miles_train.models.tiny_tokenizer import CONTROL_TOKENS, TOOL_TOKENS
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
CONVERSATION = [
    {"role": "user", "content": "17+25=?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "call_0"},
    {"role": "assistant", "content": "42"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_in_another_process(folder, tmp_path):
    out = tmp_path / "again"
    subprocess.run([sys.executable, "-m", "miles_train.models", "tiny", "--out", str(out)], check=True, timeout=100)
    assert hashes(out) == hashes(folder)


def test_another_seed_gives_other_weights_and_the_global_generator_is_untouched(folder, tmp_path):
    import torch

    before = torch.random.get_rng_state()
    other = build_tiny(tmp_path / "other", seed=1)
    assert hashes(other)["model.safetensors"] != hashes(folder)["model.safetensors"]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_loads_with_transformers_tied_in_float32_with_no_key_missing(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert str(model.dtype) == "torch.float32"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 4e5 < sum(p.numel() for p in model.parameters()) < 6e5


def test_every_id_the_model_can_sample_is_a_token(folder):
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == raw.get_vocab_size() <= 512
    assert all(raw.id_to_token(i) is not None for i in range(config["vocab_size"]))


def test_a_turn_ends_at_the_end_of_turn_token(folder, tokenizer):
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_any_bytes_have_ids(folder):
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(map(chr, range(0x250))) + "日本🙂"
    assert raw.decode(raw.encode(text).ids) == text


def test_digits_are_single_tokens(tokenizer):
    assert len(tokenizer.encode("1234567890")) == 10


def test_a_tool_call_takes_at_most_twelve_tokens(tokenizer):
    rendered = tokenizer.apply_chat_template(CONVERSATION[:2], tools=[ADD], tokenize=False)
    call = rendered[rendered.index("<tool_call>") : rendered.rindex("\n")]
    assert call == '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>'
    assert len(tokenizer.encode(call)) <= 12


def test_decoding_drops_control_tokens_and_keeps_tool_tokens(tokenizer):
    text = "".join(CONTROL_TOKENS + TOOL_TOKENS)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "".join(TOOL_TOKENS)


@pytest.mark.parametrize("tools", [None, [ADD]])
@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]])
def test_the_template_is_append_only_in_text_and_in_ids(tokenizer, tools, first):
    messages = first + CONVERSATION
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    for end in range(len(first) + 1, len(messages) + 1):
        for ask in (False, True):
            if ask and end < len(messages) and messages[end]["role"] != "assistant":
                continue
            prefix = tokenizer.apply_chat_template(
                messages[:end], tools=tools, tokenize=False, add_generation_prompt=ask and end < len(messages)
            )
            assert whole.startswith(prefix)
            assert tokenizer.encode(prefix) + tokenizer.encode(whole[len(prefix) :]) == tokenizer.encode(whole)


def test_arguments_may_be_text_or_a_mapping(tokenizer):
    as_mapping = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 17, "b": 25}}}],
    }
    one, two = (
        tokenizer.apply_chat_template([CONVERSATION[0], message], tokenize=False)
        for message in (CONVERSATION[1], as_mapping)
    )
    assert one == two


def test_several_calls_after_text_stand_on_their_own_lines(tokenizer):
    message = {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL, CALL]}
    rendered = tokenizer.apply_chat_template([CONVERSATION[0], message], tokenize=False)
    assert "Let me add.\n<tool_call>\n" in rendered
    assert "</tool_call>\n<tool_call>\n" in rendered


def test_an_existing_model_is_never_overwritten(folder):
    with pytest.raises(FileExistsError, match="not an empty folder"):
        build_tiny(folder)
