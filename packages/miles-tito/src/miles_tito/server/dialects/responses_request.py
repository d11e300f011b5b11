"""Requests of OpenAI responses, as the session takes them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from miles_tito.records import Sampling
from miles_tito.tokens.messages import normalize

from . import fields
from .base import Dialect, NewWriter, TurnRequest, openai_error
from .responses import ResponsesWriter, ToolNames


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function, functions under one name, or what the client's own service runs."""

    type: Literal["function", "namespace", "web_search", "web_search_preview"]
    name: str | None = None
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    tools: list[NamespaceFunction] = []
    """Of a namespace."""


class NamespaceFunction(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: Any = None


class ResponsesPart(msgspec.Struct):
    """Text or an image."""

    type: Literal["input_text", "output_text", "text", "input_image", "reasoning_text", "summary_text"]
    text: str | None = None
    image_url: str | None = None


class ResponsesItem(msgspec.Struct, kw_only=True):
    """A message, or a piece of an earlier reply, or what a call of it returned."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Any = None
    content: str | list[ResponsesPart] | None = None
    summary: list[ResponsesPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    call_id: str | None = None
    output: str | list[ResponsesPart] | None = None


class ReasoningSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class TextSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: fields.ReplyFormat | None = None
    verbosity: Any = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Any = None


class ResponsesRequest(fields.AgentRequest, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        str | list[ResponsesItem],
        fields.hint("Served are message, reasoning, function_call and function_call_output items of text and images."),
    ]
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool] | None, fields.hint("Only function and namespace tools are served.")] = None
    tool_choice: Annotated[fields.ToolChoice | None, fields.CHOICES] = None
    parallel_tool_calls: bool = True
    max_output_tokens: fields.Positive | None = None
    reasoning: ReasoningSetting = ReasoningSetting()
    text: Annotated[TextSetting, fields.FORMATS] = TextSetting()
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """Whatever it says, an answer is found again in its session only."""
    include: Annotated[Any, fields.only([], ["reasoning.encrypted_content"])] = None
    truncation: Annotated[Any, fields.only("disabled")] = None
    background: Annotated[Any, fields.only(False)] = None
    service_tier: Annotated[Any, fields.only("auto", "default")] = None
    top_logprobs: Annotated[Any, fields.only(0)] = None
    metadata: Any = None
    """This and the next five never change an answer."""
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None


def read_request(body: bytes, sampling: Sampling, model: str) -> tuple[TurnRequest, NewWriter]:
    """See `Dialect.read`."""
    asked = fields.as_struct(fields.read_object(body), ResponsesRequest)
    names = ToolNames()
    functions = [function for tool in asked.tools or () for function in _functions(tool, names)]
    form = fields.one_form(
        asked.text.format.form("text.format") if asked.text.format else None,
        fields.call_form(asked.tool_choice, one=not asked.parallel_tool_calls),
    )
    if functions:
        fields.check_parallel(asked.parallel_tool_calls, form)
    pinned = asked.pinned(asked.max_output_tokens, "max_output_tokens", sampling, model)
    pinned += ["reasoning.effort"] if asked.reasoning.effort is not None else []
    pinned += ["text.verbosity"] if asked.text.verbosity is not None else []
    if any(tool.strict is True for each in asked.tools or () for tool in (each, *each.tools)):
        pinned.append("tools.strict")
    request = TurnRequest(
        messages=tuple(normalize(_messages(asked, names))),
        tools=() if asked.tool_choice == "none" else None if asked.tools is None else tuple(functions),
        variables={},
        max_tokens=asked.max_output_tokens,
        stream=asked.stream,
        form=replace(form, names=tuple(names.join(None, name) for name in form.names)) if form else None,
        pinned=tuple(pinned),
        left_out=tuple(f"tools.{tool.type}" for tool in asked.tools or () if tool.type.startswith("web_search")),
    )
    return request, partial(ResponsesWriter, names=names)


RESPONSES = Dialect(read=read_request, error=openai_error)


def _functions(tool: ResponsesTool, names: ToolNames) -> list[dict[str, Any]]:
    """As OpenAI functions, under the names that the model sees; none for what only the client's service runs."""
    if tool.type not in ("function", "namespace"):
        return []
    if tool.name is None:
        raise fields.wrong("tools.name", None, "a string")
    if tool.type == "function":
        return [fields.function(names.add(None, tool.name), tool.description, tool.parameters)]
    return [fields.function(names.add(tool.name, f.name), f.description, f.parameters) for f in tool.tools]


def _messages(asked: ResponsesRequest, names: ToolNames) -> list[dict[str, Any]]:
    """All messages, in OpenAI chat's form."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for i, item in enumerate(asked.input):
        match item.type:
            case "message" if item.role != "assistant":
                messages.append({"role": item.role, "content": _content(item.content)})
            case "message":
                content = _content(item.content)
                if not isinstance(content, str):
                    raise fields.wrong(f"input[{i}].content", content, "text in an assistant message")
                _reply(messages)["content"] += content
            case "reasoning":
                _reply(messages, fresh=True)["reasoning_content"] = _text(item.content) or _text(item.summary)
            case "function_call":
                if item.name is None:
                    raise fields.wrong(f"input[{i}].name", None, "a string")
                arguments = "{}" if item.arguments is None else item.arguments
                function = {"name": names.join(item.namespace, item.name), "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _reply(messages)["tool_calls"].append(call)
            case "function_call_output":
                messages.append({"role": "tool", "content": _content(item.output), "tool_call_id": item.call_id})
    return messages


def _reply(messages: list[dict[str, Any]], *, fresh: bool = False) -> dict[str, Any]:
    """The assistant message that an item belongs to; `fresh`: one that has nothing yet."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not (fresh and (last["content"] or last["tool_calls"])):
        return last
    messages.append({"role": "assistant", "content": "", "tool_calls": []})
    return messages[-1]


def _text(parts: str | list[ResponsesPart] | None) -> str:
    return "".join(part.text or "" for part in parts) if isinstance(parts, list) else parts or ""


def _content(content: str | list[ResponsesPart] | None) -> Any:
    """Texts and images as OpenAI parts, or one text."""
    if not isinstance(content, list):
        return content or ""
    return fields.join_texts(
        [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            if part.type == "input_image"
            else {"type": "text", "text": part.text or ""}
            for part in content
        ]
    )
