"""Anthropic messages: answers whole or as server-sent events.

message_start ─▶ (content_block_start ─▶ content_block_delta … ─▶ content_block_stop) … ─▶ message_delta ─▶ message_stop
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import FinishReason, Message
from miles_tito.tokens.families.parser import TextPiece, ToolCall, pieces_of

from .base import AnswerWriter, Ending, TokenUsage, event

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


class MessagesWriter(AnswerWriter):
    """Writes Anthropic `message` objects; implements `AnswerWriter`."""

    def __init__(self, rid: str, model: str, usage: TokenUsage) -> None:
        super().__init__(rid)
        self._index = -1
        self._open: str | None = None
        """Type of the content block that is being written."""
        self._message = {"id": f"msg_{rid}", "type": "message", "role": "assistant", "model": model}
        self._usage = _usage(usage)

    def whole(self, reply: Message, ending: Ending) -> bytes:
        content = [
            self._tool_use(piece.name, piece.arguments)
            if isinstance(piece, ToolCall)
            else {"type": "thinking", "thinking": piece.text, "signature": ""}
            if piece.kind == "reasoning"
            else {"type": "text", "text": piece.text}
            for piece in pieces_of(reply)
        ]
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

    def ping(self) -> bytes:
        return _event("ping")

    def closing(self, ending: Ending) -> bytes:
        return (
            self._close()
            + _event("message_delta", delta=_stop(ending), usage=_usage(ending.usage))
            + _event("message_stop")
        )

    def failure(self, problem: RequestError) -> bytes:
        return event(anthropic_error(problem), "error")

    def _text(self, piece: TextPiece) -> bytes:
        if piece.kind == "reasoning":
            kind, empty, key = "thinking", {"thinking": "", "signature": ""}, "thinking"
        else:
            kind, empty, key = "text", {"text": ""}, "text"
        opened = b""
        if self._open != kind:
            opened = self._start_block(kind, {"type": kind, **empty})
        return opened + self._delta({"type": f"{kind}_delta", key: piece.text})

    def _call(self, call: ToolCall) -> bytes:
        started = self._start_block("tool_use", self._tool_use(call.name, {}))
        return started + self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})

    def _tool_use(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._next_call_id(), "name": name, "input": arguments}

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


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def anthropic_error(problem: RequestError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    # Claude Code knows a full context by these words.
    prefix = "prompt is too long: " if problem.code == "context_length_exceeded" else ""
    kind = _ERROR_TYPES.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{prefix}{problem}"}}
