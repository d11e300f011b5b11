"""Prompts against the encoders that the makers of models publish."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_tito.tokens.merge import Setting
from models_at_hand import joiner_of

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
USER: dict[str, Any] = {"role": "user", "content": "What is an ox? é漢"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "be short"}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": '{"kind": "cattle"}'}


def call(*, thought: str = "look it up", content: str = "") -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"word": "ox", "exact": True}}
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": thought,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def answer(text: str, thought: str = "easy") -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one user": [USER],
    "a system message": [SYSTEM, USER],
    "two turns": [SYSTEM, USER, answer("cattle"), USER],
    "a tool turn": [SYSTEM, USER, call(), RESULT],
    "a tool turn and a reply": [USER, call(content="Wait."), RESULT, answer("cattle"), USER],
}


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "direct"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_deepseek_v4_prompts_are_those_of_deepseeks_encoder(conversation: str, thinks: bool, tools: tuple[Any, ...]):
    recipe = pytest.importorskip("deepseek_recipe")
    messages = CONVERSATIONS[conversation]
    theirs = _recipe_encoding().encode(
        recipe.Conversation(
            messages=[_recipe_message(recipe, message) for message in messages],
            thinking_mode=thinks,
            tools=[recipe.ToolDefinition(**tool["function"]) for tool in tools],
            reasoning_effort="low",
        )
    )
    ours = joiner_of("DeepSeek-V4").start(messages, Setting(tools=tools, variables={"thinking": thinks}))
    assert ours.tolist() == theirs


@functools.cache
def _recipe_encoding() -> Any:
    recipe = pytest.importorskip("deepseek_recipe")
    source = joiner_of("DeepSeek-V4").tokenizer.source
    return recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_str(source))


def _recipe_message(recipe: Any, message: dict[str, Any]) -> Any:
    match message["role"]:
        case "system":
            return recipe.SystemMessage(message["content"])
        case "user":
            return recipe.UserMessage(message["content"])
        case "tool":
            return recipe.ToolMessage(message["content"], message["tool_call_id"])
        case _:
            calls = [
                recipe.ToolCall(c["id"], c["function"]["name"], json.dumps(c["function"]["arguments"]))
                for c in message.get("tool_calls", [])
            ]
            return recipe.AssistantMessage(message["content"], message["reasoning_content"], calls or None)


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "direct"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_deepseek_v3_2_prompts_are_those_of_its_encoder(conversation: str, thinks: bool):
    encoder = _sglang_module("entrypoints/openai/encoding_dsv32.py")
    messages = CONVERSATIONS[conversation]
    theirs = encoder.encode_messages(messages, "thinking" if thinks else "chat")
    ours = joiner_of("DeepSeek-V3.2").render(messages, Setting(variables={"thinking": thinks}))
    assert ours == theirs


def _sglang_module(path: str) -> Any:
    """One file of SGLang; the whole package is slow to import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("the package sglang is not installed")
    file = Path(spec.origin).parent / "srt" / path
    if not file.exists():
        pytest.skip(f"this SGLang has no {file.name}")
    alone = importlib.util.spec_from_file_location(file.stem, file)
    assert alone
    assert alone.loader
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inkling_prompts_are_those_of_its_makers_renderer(conversation: str, tools: tuple[Any, ...]):
    chat = pytest.importorskip("tml_renderers.chat")
    v0 = pytest.importorskip("tml_renderers.v0")
    tokenizers = pytest.importorskip("tml_renderers.tokenizers")
    messages = CONVERSATIONS[conversation]
    tokenizer = tokenizers.O200kBaseChatTokenizer()
    spans, _ = v0.Renderer(tokenizer).render_for_completion_with_effort(
        [m for o in chat.OpenAIMessage.from_oss_messages(_inkling(messages, tools)) for m in o.to_messages()], 0.9
    )
    theirs = tokenizer.decode([token for span in spans for token in span.span.tokens])
    assert joiner_of("Inkling").render(messages, Setting(tools=tools)) == theirs


def _inkling(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as that renderer takes them: reasoning as a part, arguments as text, tools as a message."""
    result: list[dict[str, Any]] = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key != "reasoning_content"}
        if message["role"] == "assistant":
            parts = [{"type": "thinking", "thinking": message["reasoning_content"]}]
            plain["content"] = [*parts, *([{"type": "text", "text": message["content"]}] if message["content"] else [])]
        for c in plain.get("tool_calls", []):
            function = {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}
            plain["tool_calls"] = [{**c, "function": function}]
        if message["role"] == "tool":
            plain["name"] = "look_up"
        result.append(plain)
    if tools:
        systems = sum(message["role"] == "system" for message in messages)
        result.insert(systems, {"role": "tool_declare", "content": json.dumps(tools, separators=(",", ":"))})
    return result


@pytest.fixture(scope="module")
def harmony() -> Any:
    """OpenAI's own encoder, on the vocabulary that another package carries."""
    data = importlib.util.find_spec("tml_renderers")
    if data is None or data.origin is None:
        pytest.skip("the package tml_renderers, whose vocabulary is needed, is not installed")
    library = pytest.importorskip("openai_harmony")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(Path(data.origin).parent / "data"))
        return library, library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


NOW = datetime(2026, 11, 29)


def _opening(h: Any) -> list[Any]:
    system = h.SystemContent.new().with_reasoning_effort(h.ReasoningEffort.MEDIUM)
    system = system.with_conversation_start_date(f"{NOW:%Y-%m-%d}")
    tool = TOOL["function"]
    description = h.ToolDescription.new(tool["name"], tool["description"], parameters=tool["parameters"])
    developer = h.DeveloperContent.new().with_instructions("be short").with_function_tools([description])
    return [
        h.Message.from_role_and_content(h.Role.SYSTEM, system),
        h.Message.from_role_and_content(h.Role.DEVELOPER, developer),
        h.Message.from_role_and_content(h.Role.USER, USER["content"]),
    ]


def test_gpt_oss_prompts_are_those_of_harmony(harmony: Any):
    h, encoding = harmony
    ours = joiner_of("gpt-oss").start([SYSTEM, USER], Setting(tools=(TOOL,), now=NOW))
    theirs = encoding.render_conversation_for_completion(h.Conversation.from_messages(_opening(h)), h.Role.ASSISTANT)
    assert ours.tolist() == theirs


SAMPLED_CALL = (
    "<|channel|>analysis<|message|>look it up<|end|><|start|>assistant<|channel|>commentary to=functions.look_up "
    '<|constrain|>json<|message|>{"word": "ox"}<|call|>'
)


def test_a_sampled_harmony_turn_and_its_tool_result_are_written_as_harmony_does(harmony: Any):
    """The analysis stays, since the turn goes on."""
    h, encoding = harmony
    joiner = joiner_of("gpt-oss")
    setting = Setting(tools=(TOOL,), now=NOW)
    sampled = joiner.tokenizer.encode(SAMPLED_CALL)
    joined = np.concatenate(
        [
            joiner.start([SYSTEM, USER], setting),
            sampled,
            joiner.extend([{**RESULT, "content": "cattle"}], setting, last=int(sampled[-1]), reply=call()),
        ]
    )
    author = h.Author.new(h.Role.TOOL, "functions.look_up")
    result = h.Message.from_author_and_content(author, '"cattle"').with_channel("commentary")
    messages = [
        *_opening(h),
        *encoding.parse_messages_from_completion_tokens(sampled.tolist(), h.Role.ASSISTANT),
        result.with_recipient("assistant"),
    ]
    theirs = encoding.render_conversation_for_completion(h.Conversation.from_messages(messages), h.Role.ASSISTANT)
    # Rendered again, the recipient moves into the role; everything around the sampled turn is the same.
    prompt, end = len(joiner.start([SYSTEM, USER], setting)), joiner.tokenizer.token_id("<|call|>")
    assert joined[:prompt].tolist() == theirs[:prompt]
    assert joined[prompt : prompt + len(sampled)].tolist() == sampled.tolist()
    assert joined.tolist()[prompt + len(sampled) :] == theirs[theirs.index(end) + 1 :]


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>final<|message|>cattle<|return|>",
        "<|channel|>analysis<|message|>hm\n3<|end|><|start|>assistant<|channel|>final<|message|>cattle<|return|>",
        SAMPLED_CALL,
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + SAMPLED_CALL,
    ],
)
def test_harmony_turns_are_read_as_harmony_reads_them(text: str, harmony: Any):
    from miles_tito.tokens.families.channels import HARMONY, ChannelParser

    h, encoding = harmony
    parser = ChannelParser(HARMONY, tools=True)
    parser.feed(text)
    parser.finish()
    ours = parser.message("c")
    ids = joiner_of("gpt-oss").tokenizer.encode(text).tolist()
    theirs = encoding.parse_messages_from_completion_tokens(ids, h.Role.ASSISTANT)

    def texts(*channels: str) -> str:
        return "\n".join(m.content[0].text for m in theirs if m.channel in channels and not m.recipient)

    assert ours.get("reasoning_content", "") == texts("analysis")
    assert ours["content"] == texts("final", "commentary")
    calls = [(m.recipient, json.loads(m.content[0].text)) for m in theirs if m.recipient]
    assert [
        ("functions." + c["function"]["name"], c["function"]["arguments"]) for c in ours.get("tool_calls", [])
    ] == calls


@pytest.mark.parametrize("name", ["Qwen3.5", "gpt-oss"])
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    joiner = joiner_of(name)
    tokenizer = joiner.tokenizer
    (tmp_path / "tokenizer.json").write_text(tokenizer.source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference.chat_template = tokenizer.template.source if tokenizer.template else None
    reference.bos_token = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else None
    tools = [TOOL] if joiner.lists_tools else None
    ours = joiner.start([SYSTEM, USER], Setting(tools=tuple(tools or ()), now=datetime.now()))
    theirs = reference.apply_chat_template(
        [SYSTEM, USER], tools=tools, add_generation_prompt=True, return_dict=False, tokenize=True
    )
    assert ours.tolist() == theirs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("conversation", ["one user", "two turns"])
def test_mistral_prompts_are_those_of_its_makers_encoder(conversation: str):
    """Without a system message: the old format moves that to the last user turn, in front of what is stored."""
    try:
        mistral: Any = importlib.import_module("mistral_common.tokens.tokenizers.mistral")
        instruct: Any = importlib.import_module("mistral_common.protocol.instruct.messages")
        requests: Any = importlib.import_module("mistral_common.protocol.instruct.request")
    except ImportError as error:
        pytest.skip(f"mistral-common cannot be imported: {error}")
    joiner = joiner_of("Mistral-v3")
    messages = [message for message in CONVERSATIONS[conversation] if message["role"] != "system"]
    kinds = {"user": instruct.UserMessage, "assistant": instruct.AssistantMessage}
    data = Path(mistral.__file__).parents[2] / "data" / "tekken_240911.json"
    request = requests.ChatCompletionRequest(messages=[kinds[m["role"]](content=m["content"]) for m in messages])
    theirs = mistral.MistralTokenizer.from_file(str(data)).encode_chat_completion(request).tokens
    assert joiner.start(messages, Setting()).tolist() == theirs
