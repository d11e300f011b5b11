"""Sampled text to an assistant message, as it comes: reasoning, content, tool calls.

    start ──(reasoning mark)──▶ reasoning ──(end mark)──▶ content ◀──▶ tool calls
                                    └──────(a good block of calls)──────────▲

What is not exactly a block of calls stays the text it stood in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_tito.records import Message

from .base import Family, Schemas, ToolCall

__all__ = ["Piece", "PieceParser", "TextPiece", "ToolCall", "TurnParser", "pieces_of"]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A further piece of the reasoning or of the content of a reply."""

    kind: Literal["reasoning", "content"]
    text: str


Piece = TextPiece | ToolCall


def pieces_of(message: Message) -> list[Piece]:
    """A whole assistant message as the pieces that add up to it."""
    texts = [TextPiece("reasoning", message.get("reasoning_content", "")), TextPiece("content", message["content"])]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [*(text for text in texts if text.text), *(ToolCall(f["name"], f["arguments"]) for f in functions)]


class PieceParser(ABC):
    """Reads the text of one assistant turn as it comes; its children know how families mark the parts of a turn.

    `tokens.reply_parser` makes one for each model call. Feeding a turn in any pieces gives the same result.
    """

    def __init__(self) -> None:
        self._buffer: str = ""
        """Text that is not understood yet."""
        self._texts = {"reasoning": "", "content": ""}
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._step(pieces):
            pass
        return self._add(pieces)

    def finish(self) -> list[Piece]:
        """The rest of a turn that has ended, complete or not."""
        pieces: list[Piece] = []
        self._end(pieces)
        self._buffer = ""
        return self._add(pieces)

    def message(self, call_id: str) -> Message:
        """The turn so far as a normalized assistant message; its calls are named `<call_id>_<n>`."""
        message: Message = {"role": "assistant", "content": self._texts["content"]}
        if self._texts["reasoning"]:
            message["reasoning_content"] = self._texts["reasoning"]
        if self._calls:
            message["tool_calls"] = [_plain(call, f"{call_id}_{n}") for n, call in enumerate(self._calls)]
        return message

    @abstractmethod
    def _step(self, pieces: list[Piece]) -> bool:
        """Read on in the buffer; False when more text is needed."""

    @abstractmethod
    def _end(self, pieces: list[Piece]) -> None:
        """Read what is left in the buffer, with nothing behind it."""

    def _add(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._calls.append(piece)
            else:
                self._texts[piece.kind] += piece.text
        return pieces


def _plain(call: ToolCall, call_id: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    native = {"native_id": call.native_id} if call.native_id else {}
    return {"id": call_id, "type": "function", "function": function, **native}


def begun_mark(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin one of `marks`."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


class TurnParser(PieceParser):
    """Reads the turns of families that mark reasoning and tool calls inside one text."""

    def __init__(
        self, family: Family, *, tools: bool, in_reasoning: bool = False, schemas: Schemas | None = None
    ) -> None:
        """
        Args:
            tools: whether tool calls are looked for.
            in_reasoning: the prompt ended inside a reasoning mark.
            schemas: of the tools' parameters, for formats that write values without their types.
        """
        super().__init__()
        self._reasoning = family.reasoning
        self._tool = family.tool_call if tools else None
        self._schemas = schemas or {}
        self._state: Literal["start", "reasoning", "content", "tool"] = "start" if family.reasoning else "content"
        if in_reasoning:
            self._state = "reasoning"
        self._skip_space = in_reasoning
        self._untouched = True
        """No content and no call came yet: a bare call can begin here."""
        self._held: str = ""
        """What a block of calls began with: dropped with good calls, text with bad ones."""
        self._inside: Literal["reasoning", "content"] = "content"
        """What a block of calls stands in."""

    def _end(self, pieces: list[Piece]) -> None:
        if self._state == "tool" and self._tool:
            calls = None if self._tool.close else self._tool.read(self._buffer, self._schemas)
            pieces += calls or []
            self._buffer = "" if calls else self._held + self._buffer
            self._state = self._inside
        if self._state == "reasoning":
            self._emit(pieces, "reasoning", self._buffer.rstrip())
        elif self._buffer:
            self._emit(pieces, "content", self._buffer if not self._skip_space else self._buffer.lstrip())

    def _emit(self, pieces: list[Piece], kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            pieces.append(TextPiece(kind, text))
            self._skip_space = False
            self._untouched = self._untouched and kind == "reasoning"

    def _step(self, pieces: list[Piece]) -> bool:
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
        if self._find_block(pieces, text, rest=mark + rest, inside="reasoning"):
            return True
        if mark:
            self._emit(pieces, "reasoning", text.rstrip())
            self._buffer, self._state, self._skip_space = rest, "content", True
            return True
        self._emit_but(pieces, "reasoning", self._reasoning[1], *([self._tool.open] if self._tool else []))
        return False

    def _content_step(self, pieces: list[Piece]) -> bool:
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
        if self._tool is None:
            self._emit(pieces, "content", self._buffer)
            self._buffer = ""
            return False
        if self._tool.bare and self._untouched and not self._buffer.strip():
            return False
        if self._tool.bare and self._untouched and self._buffer.lstrip().startswith("{"):
            rest = self._buffer.lstrip()
            self._inside = "content"
            self._open_tool(rest, held=self._buffer[: len(self._buffer) - len(rest)])
            return True
        if self._find_block(pieces, self._buffer, rest="", inside="content"):
            return True
        self._emit_but(pieces, "content", self._tool.open)
        return False

    def _find_block(
        self, pieces: list[Piece], text: str, *, rest: str, inside: Literal["reasoning", "content"]
    ) -> bool:
        """Go on in the first block of calls that begins in `text`, if any; `rest` comes behind it."""
        before, mark, after = text.partition(self._tool.open) if self._tool else (text, "", "")
        if not mark:
            return False
        kept = before.rstrip()
        self._emit(pieces, inside, kept)
        self._inside = inside
        self._open_tool(after + rest, held=before[len(kept) :] + mark)
        return True

    def _open_tool(self, rest: str, *, held: str) -> None:
        self._buffer, self._held, self._state, self._untouched = rest, held, "tool", False

    def _tool_step(self, pieces: list[Piece]) -> bool:
        assert self._tool
        if not self._tool.close:
            return False  # runs to the end of the turn
        text, mark, rest = self._buffer.partition(self._tool.close)
        if not mark:
            return False
        calls = self._tool.read(text, self._schemas)
        if calls is None:
            self._emit(pieces, self._inside, self._held + text + mark)
            self._state = self._inside
        else:
            pieces += calls
            self._skip_space, self._state = True, "content"
        self._buffer = rest
        return True

    def _emit_but(self, pieces: list[Piece], kind: Literal["reasoning", "content"], *marks: str) -> None:
        """Emit the buffer but for trailing whitespace and a possible beginning of one of `marks`."""
        end = len(self._buffer[: len(self._buffer) - begun_mark(self._buffer, marks)].rstrip())
        self._emit(pieces, kind, self._buffer[:end])
        self._buffer = self._buffer[end:]
