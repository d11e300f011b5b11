"""Replies as each model writes them, read back, and read the same by the parsers that engines serve with."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from miles_tito.families.channels import GRAMMARS, ChannelParser
from miles_tito.families.parser import TurnParser
from miles_tito.merge import Joiner, Setting
from models_at_hand import joiner_of

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "count": {"type": "integer"},
                "exact": {"type": "boolean"},
                "ratio": {"type": "number"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "where": {"type": "object"},
            },
        },
    },
}
SCHEMAS = {"look_up": TOOL["function"]["parameters"]}
# Values without types can hold neither line breaks at their ends nor the marks of the format.
WORDS = st.text("abcXYZ 019é漢.,:;-_/'\"\\{}()", min_size=1, max_size=12).map(str.strip).filter(bool)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "word": WORDS,
        "count": st.integers(-(10**9), 10**9),
        "exact": st.booleans(),
        "ratio": st.floats(-1e6, 1e6).map(lambda value: round(value, 3)),
        "lines": st.lists(st.integers(0, 9), max_size=3),
        "where": st.dictionaries(st.sampled_from(["file", "page"]), WORDS | st.integers(0, 9), max_size=2),
    },
)
ORACLES: dict[str, tuple[str | None, str]] = {
    "Qwen3": ("qwen3", "qwen25"),
    "Qwen3.5": ("qwen3", "qwen3_coder"),
    "DeepSeek-V3": ("deepseek-v3", "deepseekv3"),
    "DeepSeek-V3.2": ("deepseek-v3", "deepseekv32"),
    "DeepSeek-V4": ("deepseek-v4", "deepseekv4"),
    "gpt-oss": (None, "gpt-oss"),
    "Inkling": ("inkling", "inkling"),
    "GLM-4.5": ("glm45", "glm45"),
    "Kimi-K2": ("kimi_k2", "kimi_k2"),
    "MiniMax-M2": ("minimax", "minimax-m2"),
    "Nemotron-3": ("nemotron_3", "qwen3_coder"),
    "Llama-3.1": (None, "llama3"),
    "Mistral": (None, "mistral"),
    "Mistral-v3": (None, "mistral"),
}
"""Names of the reasoning and the tool-call parser that SGLang serves each model with."""


def read(joiner: Joiner, text: str, *, in_reasoning: bool = False) -> dict[str, Any]:
    family = joiner.family
    parser = (
        ChannelParser(GRAMMARS[family.channels], tools=True)
        if family.channels
        else TurnParser(family, tools=True, in_reasoning=in_reasoning, schemas=SCHEMAS)
    )
    parser.feed(text)
    parser.finish()
    return parser.message("c")


def calls_of(message: dict[str, Any]) -> list[Any]:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]


def reply_of(name: str, arguments: list[dict[str, Any]], *, content: str = "", thought: str = "") -> dict[str, Any]:
    family = joiner_of(name).family
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought and (family.reasoning or family.channels):
        message["reasoning_content"] = thought
    kept = arguments if family.parallel_calls and family.channels is None else arguments[:1]
    if kept:
        message["tool_calls"] = [
            {"id": f"functions.look_up:{n}", "type": "function", "function": {"name": "look_up", "arguments": a}}
            for n, a in enumerate(kept)
        ]
    return message


def written(name: str, message: dict[str, Any]) -> tuple[str, bool]:
    """The reply as the model would sample it, and whether its prompt opened the reasoning."""
    joiner = joiner_of(name)
    setting = Setting(tools=(TOOL,) if joiner.lists_tools else ())
    user = [{"role": "user", "content": "q"}]
    opening = joiner.render(user, setting)
    whole = joiner.render([*user, message], setting, generation_prompt=False)
    before = joiner.render(user, setting, generation_prompt=False)
    opened = bool(joiner.family.reasoning) and opening.rstrip().endswith((joiner.family.reasoning or ("",))[0])
    if not whole.startswith(opening):  # some templates write an empty reasoning without the prompt's line break
        opening, opened = before + opening[len(before) :].partition("<think>")[0], False
    assert whole.startswith(opening), (whole, opening)
    text = whole[len(opening) :]
    for end in (joiner.family.close, *joiner.family.stops):
        text = text.rstrip().removesuffix(end) if end and not joiner.family.channels else text
    return text, opened


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_reply_is_read_back_as_it_was_written(name: str, data: st.DataObject):
    arguments = data.draw(st.lists(ARGUMENTS, max_size=2))
    content = data.draw(st.sampled_from(["", "Sure."])) if arguments else "Sure."
    thought = data.draw(st.sampled_from(["", "let me see:\n3 and 4"]))
    if joiner_of(name).family.name in ("llama-3.1", "gpt-oss") and arguments:
        content = ""  # their templates write no text beside a call
    message = reply_of(name, arguments, content=content, thought=thought)
    text, opened = written(name, message)
    got = read(joiner_of(name), text, in_reasoning=opened)
    assert calls_of(got) == calls_of(message)
    assert got["content"].strip() == content
    if "reasoning_content" in message and not (name == "DeepSeek-V3" or (name == "Kimi-K2" and not thought)):
        assert got.get("reasoning_content", "").strip() in (thought, "")


_SAMPLED_HEADER = "<|channel|>commentary to=functions.look_up <|constrain|>json"


def oracle(name: str, text: str) -> tuple[str, list[Any]]:
    parsers = pytest.importorskip("llm_router_utils.sglang.srt.function_call.function_call_parser")
    reasoning = pytest.importorskip("llm_router_utils.sglang.srt.parser.reasoning_parser")
    thinks, tools = ORACLES[name]
    if thinks:
        _, text = reasoning.ReasoningParser(thinks).parse_non_stream(text)
    tool = parsers.Tool.model_validate(TOOL)
    content, items = parsers.FunctionCallParser([tool], tools).parse_non_stream(text or "")
    return (content or "").strip(), [[item.name, json.loads(item.parameters)] for item in items]


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=10, deadline=None)
@given(arguments=st.lists(ARGUMENTS.filter(bool), min_size=1, max_size=2))  # MiniMax's takes no call without arguments
def test_the_engines_own_parser_reads_the_same(name: str, arguments: list[dict[str, Any]]):
    text, opened = written(name, reply_of(name, arguments, thought="hm"))
    if name == "gpt-oss":  # its template writes the recipient in the header's role, the model behind the channel
        text = text.replace(" to=functions.look_up<|channel|>commentary json", _SAMPLED_HEADER)
    text = text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")  # the engine knows this list by its space
    content, calls = oracle(name, ("<think>" if opened else "") + text)
    got = read(joiner_of(name), text, in_reasoning=opened)
    assert (got["content"].strip(), calls_of(got)) == (content, calls)
