"""Sampled text to an assistant message, as it comes: reasoning, content, tool calls.

    start ──(reasoning mark)──▶ reasoning ──(end mark)──▶ content ◀──▶ tool call

Feeding a turn in any pieces gives the same result. A tool call that is no JSON object with a name and an object of
arguments stays text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from miles_tito.records import Message

from .base import Family


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the reasoning or of the content."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete, well-formed call."""

    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


Piece = TextPiece | ToolCall


class TurnParser:
    """Reads one assistant turn."""

    def __init__(self, family: Family, *, tools: bool, in_reasoning: bool = False) -> None:
        """`tools`: whether tool calls are looked for. `in_reasoning`: the prompt ended inside a reasoning mark."""
        self._reasoning = family.reasoning
        self._tool = family.tool_call if tools else None
        self._state: Literal["start", "reasoning", "content", "tool"] = "start" if family.reasoning else "content"
        if in_reasoning:
            self._state = "reasoning"
        self._buffer: str = ""
        self._skip_space = in_reasoning
        self._held: str = ""
        """Whitespace before a tool call: dropped with a good call, content with a bad one."""
        self._texts = {"reasoning": "", "content": ""}
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._step(pieces):
            pass
        return self._record(pieces)

    def finish(self) -> list[Piece]:
        """The rest of a turn that has ended, complete or not."""
        pieces: list[Piece] = []
        if self._state == "tool" and self._tool:
            self._buffer = self._held + self._tool[0] + self._buffer
        if self._state == "reasoning":
            self._emit(pieces, "reasoning", self._buffer.rstrip())
        elif self._buffer:
            self._emit(pieces, "content", self._buffer if not self._skip_space else self._buffer.lstrip())
        self._buffer = ""
        return self._record(pieces)

    def message(self, call_id: str) -> Message:
        """The turn so far as a normalized assistant message; its calls are named `<call_id>_<n>`."""
        message: Message = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning"]:
            message["reasoning_content"] = self._texts["reasoning"]
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": f"{call_id}_{n}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for n, call in enumerate(self._calls)
            ]
        return message

    def _record(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._calls.append(piece)
            else:
                self._texts[piece.kind] += piece.text
        return pieces

    def _emit(self, pieces: list[Piece], kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            pieces.append(TextPiece(kind, text))
            self._skip_space = False

    def _step(self, pieces: list[Piece]) -> bool:
        """Read on in the buffer; False when more text is needed."""
        match self._state:
            case "start":
                return self._start_step()
            case "reasoning":
                return self._reasoning_step(pieces)
            case "content":
                return self._content_step(pieces)
            case "tool":
                return self._tool_step(pieces)

    def _start_step(self) -> bool:
        assert self._reasoning
        mark = self._reasoning[0]
        text = self._buffer.lstrip()
        if text.startswith(mark):
            self._buffer, self._state, self._skip_space = text[len(mark) :], "reasoning", True
            return True
        if mark.startswith(text):
            return False  # not enough to tell yet
        self._state = "content"
        return True

    def _reasoning_step(self, pieces: list[Piece]) -> bool:
        assert self._reasoning
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
        text, mark, rest = self._buffer.partition(self._reasoning[1])
        if mark:
            self._emit(pieces, "reasoning", text.rstrip())
            self._buffer, self._state, self._skip_space = rest, "content", True
            return True
        self._emit_but(pieces, "reasoning", self._reasoning[1])
        return False

    def _content_step(self, pieces: list[Piece]) -> bool:
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
        if self._tool is None:
            self._emit(pieces, "content", self._buffer)
            self._buffer = ""
            return False
        text, mark, rest = self._buffer.partition(self._tool[0])
        if mark:
            kept = text.rstrip()
            self._emit(pieces, "content", kept)
            self._buffer, self._state, self._held = rest, "tool", text[len(kept) :]
            return True
        self._emit_but(pieces, "content", self._tool[0])
        return False

    def _tool_step(self, pieces: list[Piece]) -> bool:
        assert self._tool
        text, mark, rest = self._buffer.partition(self._tool[1])
        if not mark:
            return False
        call = _parse_call(text)
        if call is None:
            self._emit(pieces, "content", self._held + self._tool[0] + text + mark)
        else:
            pieces.append(call)
            self._skip_space = True
        self._buffer, self._state = rest, "content"
        return True

    def _emit_but(self, pieces: list[Piece], kind: Literal["reasoning", "content"], mark: str) -> None:
        """Emit the buffer but for trailing whitespace and a possible beginning of `mark`."""
        end = len(self._buffer)
        for size in range(min(len(mark) - 1, end), 0, -1):
            if self._buffer.endswith(mark[:size]):
                end -= size
                break
        end = len(self._buffer[:end].rstrip())
        self._emit(pieces, kind, self._buffer[:end])
        self._buffer = self._buffer[end:]


def _parse_call(text: str) -> ToolCall | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    if not isinstance(value, dict):
        return None
    call = cast("dict[str, Any]", value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or set(call) - {"name", "arguments"}:
        return None
    return ToolCall(name, cast("dict[str, Any]", arguments))
