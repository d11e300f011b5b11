"""Requests of Anthropic messages, as the session takes them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec

from miles_tito.records import Sampling
from miles_tito.tokens.constrained_output import Form
from miles_tito.tokens.messages import normalize

from . import fields
from .base import Dialect, NewWriter, TurnRequest
from .messages import MessagesWriter, anthropic_error


# The parts of a request, by their names in it.
class MessageBlock(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: Any = None


class TextBlock(MessageBlock, tag="text"):
    text: str
    citations: Any = None


class ImageSource(msgspec.Struct):
    url: str | None = None
    media_type: str | None = None
    data: str | None = None


class ImageBlock(MessageBlock, tag="image"):
    source: ImageSource


class ThinkingBlock(MessageBlock, tag="thinking"):
    thinking: str
    signature: Any = None


class ToolUseBlock(MessageBlock, tag="tool_use"):
    name: str
    id: str | None = None
    input: dict[str, Any] = {}
    caller: Any = None


class ToolResultBlock(MessageBlock, tag="tool_result"):
    """What a call returned. An error shows in its text; chat templates have no other place for it."""

    tool_use_id: str | None = None
    content: str | list[TextBlock | ImageBlock] = ""
    is_error: Any = None


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    content: str | list[TextBlock | ImageBlock] = ""


class UserMessage(msgspec.Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: str | list[TextBlock | ImageBlock | ToolResultBlock] = ""


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock] = ""


class CustomTool(msgspec.Struct):
    """A tool that the client runs."""

    name: str
    description: Any = None
    input_schema: dict[str, Any] = {}
    type: Literal["custom"] | None = None
    strict: Any = None


class MessagesToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "none", "any", "tool"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def form(self) -> Form | None:
        """The calls that it forces; None where it forces none."""
        one = self.disable_parallel_tool_use
        match self.type:
            case "any":
                return Form(param="tool_choice", one=one)
            case "tool" if self.name is not None:
                return Form(param="tool_choice", names=(self.name,), one=True)
            case "tool":
                raise fields.wrong("tool_choice.name", None, "a string")
            case _ if one:
                raise fields.refused("tool_choice", "The model may call several tools where it chooses to.")
            case _:
                return None


class ThinkingMode(msgspec.Struct):
    type: Literal["adaptive", "enabled", "disabled"]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: fields.ReplyFormat | None = None
    effort: Any = None


class ContextEdit(msgspec.Struct):
    keep: Literal["all"]


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] = []


class _Request(fields.AgentRequest, kw_only=True):
    messages: Annotated[
        list[UserMessage | AssistantMessage | SystemMessage],
        fields.hint("This model takes text, images, thinking and tool blocks where they belong."),
    ]
    system: str | list[TextBlock | ImageBlock] | None = None
    tools: Annotated[list[CustomTool] | None, fields.hint("Only tools that the client runs are served.")] = None
    tool_choice: Annotated[MessagesToolChoice, fields.hint("Only auto, none, any and tool are served.")] = (
        MessagesToolChoice()
    )
    stop_sequences: fields.NonEmpty | tuple[fields.NonEmpty, ...] = ()
    top_k: float | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: Annotated[
        ContextManagement | None, fields.hint("Only edits that keep all are served: turns are recorded whole.")
    ] = None
    mcp_servers: Annotated[Any, fields.only([])] = None
    service_tier: Annotated[Any, fields.only("auto", "standard_only")] = None
    metadata: Any = None
    """This and the next one never change an answer."""
    cache_control: Any = None


class CountRequest(_Request, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    max_tokens: fields.Positive | None = None


class MessagesRequest(_Request, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: fields.Positive


def read_request(
    body: bytes, sampling: Sampling, model: str, *, cls: type[CountRequest | MessagesRequest] = MessagesRequest
) -> tuple[TurnRequest, NewWriter]:
    """See `Dialect.read`."""
    asked = fields.as_struct(_without_nulls(fields.read_object(body)), cls)
    output = asked.output_config
    tools = None
    if asked.tools is not None:
        tools = tuple(fields.function(tool.name, tool.description, tool.input_schema) for tool in asked.tools)
    pinned = asked.pinned(asked.max_tokens, "max_tokens", sampling, model)
    if asked.thinking and asked.thinking.type != "adaptive":
        pinned.append("thinking")
    if output.effort is not None:
        pinned.append("output_config.effort")
    if any(tool.strict is True for tool in asked.tools or ()):
        pinned.append("tools.strict")
    request = TurnRequest(
        messages=tuple(normalize(_messages(asked))),
        tools=() if asked.tool_choice.type == "none" else tools,
        variables={},
        max_tokens=asked.max_tokens,
        stop=(asked.stop_sequences,) if isinstance(asked.stop_sequences, str) else asked.stop_sequences,
        stream=asked.stream,
        form=fields.one_form(
            output.format.form("output_config.format") if output.format else None, asked.tool_choice.form()
        ),
        pinned=tuple(pinned),
    )
    return request, MessagesWriter


_OUR_OWN = ("messages", "content", "system", "tools")
"""What holds messages, blocks and tools; all else is the user's data."""


def _without_nulls(value: Any) -> Any:
    """Clients repeat blocks with all fields that their own version knows; what a tool is given stays as it is."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {k: _without_nulls(v) if k in _OUR_OWN else v for k, v in items if v is not None}
    return value


def _messages(asked: _Request) -> list[dict[str, Any]]:
    """As OpenAI chat messages."""
    result: list[dict[str, Any]] = []
    if asked.system is not None:
        result.append({"role": "system", "content": _parts(asked.system)})
    for message in asked.messages:
        match message:
            case SystemMessage(content=content):
                result.append({"role": "system", "content": _parts(content)})
            case AssistantMessage(content=content):
                result.append(_assistant(content))
            case UserMessage(content=content):
                result += _user(content)
    return result


def _parts(content: str | list[TextBlock | ImageBlock]) -> Any:
    """Texts and images as OpenAI parts, or one text."""
    return fields.join_texts([_part(block) for block in content]) if isinstance(content, list) else content


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    return {"type": "image_url", "image_url": {"url": source.url or f"data:{source.media_type};base64,{source.data}"}}


def _assistant(content: str | list[TextBlock | ThinkingBlock | ToolUseBlock]) -> dict[str, Any]:
    if not isinstance(content, list):
        return {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for block in content:
        match block:
            case TextBlock(text=text):
                message["content"] += text
            case ThinkingBlock(thinking=text):
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                message["tool_calls"].append({"id": block.id, "type": "function", "function": function})
    return message


def _user(content: str | list[TextBlock | ImageBlock | ToolResultBlock]) -> list[dict[str, Any]]:
    """Tool results as messages of their own, and what stands between them."""
    if not isinstance(content, list):
        return [{"role": "user", "content": content}]
    result: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in [*content, None]:
        if isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block))
            continue
        if parts:
            result.append({"role": "user", "content": fields.join_texts(parts)})
            parts = []
        if block is not None:
            result.append({"role": "tool", "content": _parts(block.content), "tool_call_id": block.tool_use_id})
    return result or [{"role": "user", "content": ""}]


MESSAGES = Dialect(read=read_request, error=anthropic_error)
COUNT_TOKENS = Dialect(read=partial(read_request, cls=CountRequest), error=anthropic_error)
