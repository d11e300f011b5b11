"""Anthropic messages: requests read strictly, answers whole or as server-sent events.

message_start ─▶ (content_block_start ─▶ content_block_delta … ─▶ content_block_stop) … ─▶ message_delta ─▶ message_stop
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message, Sampling
from miles_tito.tokens.constrained_output import Form
from miles_tito.tokens.families.parser import Piece, ToolCall
from miles_tito.tokens.messages import normalize

from . import fields
from .base import AnswerWriter, Ending, TurnRequest, Usage, call_id, event
from .demands import json_form, one_form
from .parts import join_texts

_NEUTRAL: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "service_tier": ("auto", "standard_only")}
_NO_EFFECT = ("metadata", "cache_control")
_READ = (
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thinking"),
    *("temperature", "top_p", "top_k", "context_management", "output_config"),
)
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.ABORT: "end_turn",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessagesDialect:
    """`POST /v1/messages`."""

    def __init__(self, *, counts_only: bool = False) -> None:
        """`counts_only`: of `count_tokens`, whose requests bear no `max_tokens`."""
        self._counts_only = counts_only

    def read(self, body: bytes, *, sampling: Sampling, model: str) -> tuple[TurnRequest, AnswerWriter]:
        """See `Dialect.read`."""
        given = fields.read_object(body)
        fields.refuse_others(given, read=_READ, neutral=_NEUTRAL, no_effect=_NO_EFFECT)
        max_tokens = fields.integer(given, "max_tokens", at_least=1)
        if max_tokens is None and not self._counts_only:
            raise fields.wrong("max_tokens", None, "an integer of at least 1")
        pinned = fields.pinned_fields(
            given, sampling=sampling, model=model, max_tokens=max_tokens, max_tokens_field="max_tokens"
        )
        request = TurnRequest(
            messages=tuple(normalize(_messages(given))),
            tools=_tools(given),
            variables={},
            max_tokens=max_tokens,
            stop=fields.strings(given, "stop_sequences"),
            stream=fields.boolean(given, "stream"),
            form=one_form(
                json_form(fields.mapping(fields.mapping(given, "output_config"), "format"), "output_config.format"),
                _forced_calls(given),
            ),
            pinned=(*pinned, *_pinned_here(given), *fields.strict_tools(given)),
        )
        return request, MessagesWriter()

    def error(self, problem: RequestError) -> bytes:
        """See `Dialect.error`."""
        return msgspec.json.encode(_error(problem))


class MessagesWriter:
    """Writes `message` objects; see `AnswerWriter`."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        """Type of the content block that is being written."""
        self._num_calls = 0

    def start(self, *, rid: str, model: str, usage: Usage) -> None:
        self._rid = rid
        self._message = {"id": f"msg_{rid}", "type": "message", "role": "assistant", "model": model}
        self._usage = _usage(usage)

    def whole(self, reply: Message, ending: Ending) -> bytes:
        content: list[dict[str, Any]] = []
        if reply.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reply["reasoning_content"], "signature": ""})
        if reply["content"]:
            content.append({"type": "text", "text": reply["content"]})
        for index, call in enumerate(reply.get("tool_calls", [])):
            content.append(self._tool_use(index, call["function"]["name"], call["function"]["arguments"]))
        return msgspec.json.encode(
            {**self._message, "content": content, **_stop(ending), "usage": _usage(ending.usage)}
        )

    def opening(self) -> bytes:
        message: dict[str, Any] = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
        }
        return _event("message_start", message=message) + _event("ping")

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(self._call(piece) if isinstance(piece, ToolCall) else self._text(piece) for piece in pieces)

    def ping(self) -> bytes:
        return _event("ping")

    def closing(self, ending: Ending) -> bytes:
        return (
            self._close()
            + _event("message_delta", delta=_stop(ending), usage=_usage(ending.usage))
            + _event("message_stop")
        )

    def failure(self, problem: RequestError) -> bytes:
        return event(_error(problem), "error")

    def _text(self, piece: Any) -> bytes:
        if piece.kind == "reasoning":
            kind, empty, key = "thinking", {"thinking": "", "signature": ""}, "thinking"
        else:
            kind, empty, key = "text", {"text": ""}, "text"
        opened = b""
        if self._open != kind:
            opened = self._start_block(kind, {"type": kind, **empty})
        return opened + self._delta({"type": f"{kind}_delta", key: piece.text})

    def _call(self, call: ToolCall) -> bytes:
        block = self._tool_use(self._num_calls, call.name, {})
        self._num_calls += 1
        started = self._start_block("tool_use", block)
        return started + self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})

    def _tool_use(self, index: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": call_id(self._rid, index), "name": name, "input": arguments}

    def _start_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _stop(ending: Ending) -> dict[str, Any]:
    reason = "stop_sequence" if ending.stop_string is not None else _STOP_REASONS[ending.finish]
    return {"stop_reason": reason, "stop_sequence": ending.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _error(problem: RequestError) -> dict[str, Any]:
    # Claude Code knows a full context by these words.
    prefix = "prompt is too long: " if problem.code == "context_length_exceeded" else ""
    kind = _ERROR_TYPES.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{prefix}{problem}"}}


def _pinned_here(given: Mapping[str, Any]) -> list[str]:
    pinned: list[str] = []
    thinking = fields.mapping(given, "thinking")
    if thinking:
        if thinking.get("type") not in ("adaptive", "enabled", "disabled"):
            raise fields.wrong("thinking", thinking, "of type adaptive, enabled or disabled")
        if thinking["type"] != "adaptive":
            pinned.append("thinking")
    output = fields.mapping(given, "output_config")
    if set(output) - {"format", "effort"}:
        raise fields.refused("output_config", f"Only `effort` is known, got {sorted(output)}.")
    if "effort" in output:
        pinned.append("output_config.effort")
    for edit in fields.sequence(fields.mapping(given, "context_management"), "edits"):
        if fields.item(edit, "context_management.edits").get("keep") != "all":
            raise fields.refused("context_management", "Only edits that keep all are served: turns are recorded whole.")
    return pinned


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    tools: list[Mapping[str, Any]] = []
    for tool in fields.sequence(given, "tools"):
        tool = fields.item(tool, "tools")
        if tool.get("type", "custom") != "custom":
            raise fields.refused("tools", f"Only tools that the client runs are served, got {tool['type']!r:.80}.")
        function = {
            "name": fields.text(tool, "name", "tools"),
            **({"description": tool["description"]} if "description" in tool else {}),
            "parameters": fields.mapping(tool, "input_schema"),
        }
        tools.append({"type": "function", "function": function})
    if fields.mapping(given, "tool_choice").get("type") == "none":
        return ()
    return tuple(tools) if "tools" in given else None


def _forced_calls(given: Mapping[str, Any]) -> Form | None:
    choice = fields.mapping(given, "tool_choice")
    one = fields.boolean(choice, "disable_parallel_tool_use")
    match choice.get("type", "auto"):
        case "any":
            return Form(param="tool_choice", one=one)
        case "tool":
            return Form(param="tool_choice", names=(fields.text(choice, "name", "tool_choice"),), one=True)
        case "auto" | "none" if not one:
            return None
        case "auto" | "none":
            raise fields.refused("tool_choice", "The model may call several tools where it chooses to.")
        case kind:
            raise fields.refused("tool_choice", f"Only auto, none, any and tool are served, got {kind!r:.80}.")


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As OpenAI chat messages."""
    result: list[dict[str, Any]] = []
    if "system" in given:
        result.append({"role": "system", "content": _plain(given["system"], "system")})
    for i, message in enumerate(fields.sequence(given, "messages")):
        where = f"messages[{i}]"
        message = fields.item(message, where)
        role, content = message.get("role"), message.get("content", "")
        extra = sorted(set(message) - {"role", "content"})
        if extra:
            raise fields.refused(where, f"Fields that no message takes here: {', '.join(extra)}.")
        if role == "assistant":
            result.append(_assistant(content, where))
        elif role == "user":
            result += _user(content, where)
        elif role == "system":
            result.append({"role": "system", "content": _plain(content, where)})
        else:
            raise fields.wrong(f"{where}.role", role, "user, assistant or system")
    return result


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise fields.wrong(f"{where}.content", content, "a string or a list of blocks")
    blocks = [fields.item(block, f"{where}.content[{i}]") for i, block in enumerate(cast("list[Any]", content))]
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in blocks]


def _plain(content: Any, where: str) -> Any:
    """Texts and images as OpenAI parts, or one text."""
    return join_texts([_part(block, where) for block in _blocks(content, where)])


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            _only(block, ("text", "citations"), where)
            return {"type": "text", "text": fields.text(block, "text", where)}
        case "image":
            _only(block, ("source",), where)
            source = fields.mapping(block, "source")
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case kind:
            raise RequestError(
                f"{where} holds a {kind!r} block; this model takes text, images, thinking and tool blocks where they "
                "belong.",
                code="unsupported_content",
                param=where,
            )


def _only(block: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    extra = sorted(set(block) - {"type", *known})
    if extra:
        raise fields.refused(where, f"Fields that no {block['type']} block takes here: {', '.join(extra)}.")


def _assistant(content: Any, where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for block in _blocks(content, where):
        match block.get("type"):
            case "text":
                _only(block, ("text", "citations"), where)
                message["content"] += fields.text(block, "text", where)
            case "thinking":
                _only(block, ("thinking", "signature"), where)
                reasoning = fields.text(block, "thinking", where)
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case "tool_use":
                _only(block, ("id", "name", "input", "caller"), where)
                function = {"name": block.get("name"), "arguments": block.get("input", {})}
                message["tool_calls"].append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                _part(block, where)
                raise fields.wrong(where, block.get("type"), "text, thinking or tool_use in an assistant message")
    return message


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """Tool results as messages of their own, and what stands between them."""
    result: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []

    def flush() -> None:
        if parts:
            result.append({"role": "user", "content": join_texts(parts)})
            parts.clear()

    for block in _blocks(content, where):
        if block.get("type") == "tool_result":
            flush()
            # An error shows in its text; chat templates have no other place for it.
            _only(block, ("tool_use_id", "content", "is_error"), where)
            output = _plain(block.get("content", ""), where)
            result.append({"role": "tool", "content": output, "tool_call_id": block.get("tool_use_id")})
        else:
            parts.append(_part(block, where))
    flush()
    return result or [{"role": "user", "content": ""}]
