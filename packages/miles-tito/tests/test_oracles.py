"""Replies as each model writes them, read back, and read the same by the parsers that engines serve with."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from miles_tito.tokens.families.channels import GRAMMARS, ChannelParser
from miles_tito.tokens.families.parser import TurnParser
from miles_tito.tokens.merge import Joiner, Setting
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


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=10, deadline=None)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=2), sizes=st.lists(st.integers(1, 9), max_size=40))
def test_a_reply_reads_the_same_in_any_pieces(name: str, arguments: list[dict[str, Any]], sizes: list[int]):
    text, opened = written(name, reply_of(name, arguments, thought="hm"))
    family = joiner_of(name).family
    parser = (
        ChannelParser(GRAMMARS[family.channels], tools=True)
        if family.channels
        else TurnParser(family, tools=True, in_reasoning=opened, schemas=SCHEMAS)
    )
    rest = text
    for size in [*sizes, len(text)]:
        parser.feed(rest[:size])
        rest = rest[size:]
    parser.finish()
    assert parser.message("c") == read(joiner_of(name), text, in_reasoning=opened)


MALFORMED = [
    ("Qwen3.5", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("Qwen3.5", "<tool_call>\n<function=f>\nsurely\n</function>\n</tool_call>"),
    (
        "Qwen3.5",
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter><parameter=a>2</parameter></function>\n</tool_call>",
    ),
    ("Qwen3.5", "<tool_call>\n<function=f>\n</function>"),
    ("GLM-4.5", "<tool_call>two words\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("GLM-4.5", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
    ("GLM-4.5", "<tool_call></tool_call>"),
    ("Kimi-K2", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
    (
        "Kimi-K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    (
        "Kimi-K2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    ("DeepSeek-V4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\noops\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
    (
        "DeepSeek-V4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "DeepSeek-V4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">one'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1\n</invoke>\n</minimax:tool_call>'),
    ("Mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("Mistral", "[TOOL_CALLS]f{}"),
    ("Mistral", '[TOOL_CALLS][{"name": "f"}, 3]'),
    ("Llama-3.1", '{"name": "f", "parameters": {}} and more'),
    ("Llama-3.1", '{"answer": 3}'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_not_exactly_a_block_of_calls_stays_text(name: str, text: str):
    assert read(joiner_of(name), f"so\n{text}" if name != "Llama-3.1" else text) == {
        "role": "assistant",
        "content": f"so\n{text}" if name != "Llama-3.1" else text,
    }


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{oops<|call|>",
        '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "o',
    ],
)
def test_a_malformed_harmony_call_stays_text(text: str):
    message = read(joiner_of("gpt-oss"), text)
    assert "tool_calls" not in message
    assert message["content"] in text
    assert message["content"].startswith("{")


def test_a_call_ends_reasoning_that_was_not_closed():
    """As engines read it; a malformed one leaves the reasoning as it is."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    message = read(joiner_of("Qwen3"), f"<think>\nhm {call}")
    assert (message["reasoning_content"], message["content"], calls_of(message)) == ("hm", "", [["look_up", {}]])
    message = read(joiner_of("Qwen3"), "<think>\nI could write <tool_call>x</tool_call> here.\n</think>\n\nno")
    assert message["reasoning_content"] == "I could write <tool_call>x</tool_call> here."
    assert message["content"] == "no"


@pytest.mark.parametrize(
    ("schema", "written_as", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "true", True),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"enum": ["3", "4"]}, "3", "3"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": [null]}', {"a": [None]}),
        ({}, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_values_without_types_get_those_of_the_tools_schema(schema: Any, written_as: str, value: Any):
    schemas = {"f": {"type": "object", "properties": {} if schema is None else {"a": schema}}}
    parser = TurnParser(joiner_of("MiniMax-M2").family, tools=True, schemas=schemas)
    parser.feed(f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{written_as}</parameter>\n</invoke>\n')
    parser.feed("</minimax:tool_call>")
    parser.finish()
    assert calls_of(parser.message("c")) == [["f", {"a": value}]]
