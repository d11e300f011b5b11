"""Turns that are a sequence of messages on channels: harmony (gpt-oss) and Inkling.

header ──(mark)──▶ body of a channel ──(end)──▶ header …

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from miles_tito.records import Message

from .base import ToolCall
from .parser import MessageBuilder, Piece, TextPiece

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelGrammar:
    """The marks of one family's messages."""

    opens: tuple[str, ...]
    """What ends a header and begins the body."""
    ends: tuple[str, ...]
    """What ends the body."""
    classify: Callable[[str, str], tuple[Kind, str]]
    """Header and mark to the kind of the body, and the name of the tool for a call."""
    read: Callable[[str, str], ToolCall | None]
    """Name and body of a call; None where the body is no call."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opens, *self.ends)


class ChannelParser:
    """Reads one turn on channels; see `miles_tito.tokens.families.parser.Parser`."""

    def __init__(self, grammar: ChannelGrammar, *, tools: bool) -> None:
        self._grammar = grammar
        self._tools = tools
        self._buffer: str = ""
        self._kind: Kind | None = None
        """Of the body that is being read; None in a header."""
        self._name = ""
        self._seen: set[str] = set()
        """Kinds of text that came before: a second body on a channel begins a new line."""
        self._fresh = False
        self._built = MessageBuilder()

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and (self._header_step() if self._kind is None else self._body_step(pieces)):
            pass
        self._built.add(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._kind in ("reasoning", "content"):
            self._emit(pieces, self._buffer)
        elif self._kind == "call":
            self._end_call(pieces, self._buffer, complete=False)
        elif self._header_text(self._buffer):
            self._kind = "content"
            self._emit(pieces, self._buffer)
        self._buffer = ""
        self._built.add(pieces)
        return pieces

    def message(self, call_id: str) -> Message:
        return self._built.message(call_id)

    def _header_step(self) -> bool:
        at, mark = _first(self._buffer, self._grammar.opens)
        if not mark:
            return False
        self._kind, self._name = self._grammar.classify(self._buffer[:at], mark)
        if self._kind == "call" and not self._tools:
            self._kind = "content"
        self._fresh = self._kind in self._seen
        self._buffer = self._buffer[at + len(mark) :]
        return True

    def _body_step(self, pieces: list[Piece]) -> bool:
        at, mark = _first(self._buffer, self._grammar.ends)
        if mark:
            body, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            if self._kind == "call":
                self._end_call(pieces, body, complete=True)
            else:
                self._emit(pieces, body)
            self._kind = None
            return True
        if self._kind != "call":
            end = len(self._buffer) - _tail(self._buffer, self._grammar.ends)
            self._emit(pieces, self._buffer[:end])
            self._buffer = self._buffer[end:]
        return False

    def _end_call(self, pieces: list[Piece], body: str, *, complete: bool) -> None:
        call = self._grammar.read(self._name, body) if complete else None
        if call:
            pieces.append(call)
            return
        self._kind, self._fresh = "content", "content" in self._seen
        self._emit(pieces, body)

    def _emit(self, pieces: list[Piece], text: str) -> None:
        kind = "reasoning" if self._kind == "reasoning" else "content"
        if text:
            pieces.append(TextPiece(kind, ("\n" if self._fresh else "") + text))
            self._fresh = False
            self._seen.add(kind)

    @staticmethod
    def _header_text(header: str) -> str:
        return re.sub(r"<\|[a-z_]+\|>", "", header).strip().removeprefix("assistant")


def _harmony_kind(header: str, mark: str) -> tuple[Kind, str]:
    recipient = re.search(r"\bto=([^\s<]+)", header)
    if recipient:
        return "call", recipient[1].removeprefix("functions.")
    return ("reasoning" if "<|channel|>analysis" in header else "content"), ""


def _harmony_call(name: str, body: str) -> ToolCall | None:
    value = _json(body)
    return ToolCall(name, cast("dict[str, Any]", value)) if isinstance(value, dict) else None


def _inkling_kind(header: str, mark: str) -> tuple[Kind, str]:
    kinds: dict[str, Kind] = {"<|content_thinking|>": "reasoning", "<|content_text|>": "content"}
    return kinds.get(mark, "call"), ""


def _inkling_call(name: str, body: str) -> ToolCall | None:
    value = _json(body)
    if not isinstance(value, dict):
        return None
    call = cast("dict[str, Any]", value)
    named, arguments = call.get("name"), call.get("args", {})
    if not isinstance(named, str) or not named or not isinstance(arguments, dict):
        return None
    return ToolCall(named, cast("dict[str, Any]", arguments))


HARMONY = ChannelGrammar(
    opens=("<|message|>",), ends=("<|end|>", "<|call|>", "<|return|>"), classify=_harmony_kind, read=_harmony_call
)
INKLING = ChannelGrammar(
    opens=("<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    ends=("<|end_message|>",),
    classify=_inkling_kind,
    read=_inkling_call,
)
GRAMMARS = {"harmony": HARMONY, "inkling": INKLING}
HEADER_MARKS = {
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>"),
    "inkling": ("<|message_model|>", "<|content_model_end_sampling|>"),
}
"""Tokens that stand in headers; decoded along with the marks of the grammar."""


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """The earliest of `marks` in `text`; an empty mark where there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found) if found else (len(text), "")


def _tail(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may begin a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
