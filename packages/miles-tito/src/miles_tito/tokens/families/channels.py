"""Families whose turn is a sequence of messages on channels, and what reads it.

gpt-oss   harmony: a reply ends with `<|return|>`, a call with `<|call|>`; a message in between with `<|end|>`
Inkling   the model samples its own header; it ships no chat template, and this is one

header ──(mark)──▶ body of a channel ──(end)──▶ header …

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from .base import Family, ToolCall
from .calls import json_object
from .parser import Piece, PieceParser, TextPiece, begun_mark

Kind = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelGrammar:
    """The marks between the messages of a turn, and how the header of one is read."""

    opens: tuple[str, ...]
    """What ends a header and begins the body."""
    ends: tuple[str, ...]
    """What ends the body."""
    inner: tuple[str, ...]
    """Tokens that stand in headers."""
    classify: Callable[[str, str], tuple[Kind, str]]
    """Header and mark to the kind of the body, and the name of the tool for a call."""
    read: Callable[[str, str], ToolCall | None]
    """Name and body of a call; None where the body is no call."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opens, *self.ends, *self.inner)


class ChannelParser(PieceParser):
    """Reads the turns of families that write messages on channels."""

    def __init__(self, grammar: ChannelGrammar, *, tools: bool) -> None:
        super().__init__()
        self._grammar = grammar
        self._tools = tools
        self._kind: Kind | None = None
        """Of the body that is being read; None in a header."""
        self._name = ""
        self._seen: set[str] = set()
        """Kinds of text that came before: a second body on a channel begins a new line."""
        self._fresh = False

    def _step(self, pieces: list[Piece]) -> bool:
        return self._header_step() if self._kind is None else self._body_step(pieces)

    def _end(self, pieces: list[Piece]) -> None:
        if self._kind == "call":
            self._end_call(pieces, self._buffer, complete=False)
        elif self._kind is not None:
            self._emit(pieces, self._buffer)
        elif re.sub(r"<\|[a-z_]+\|>", "", self._buffer).strip().removeprefix("assistant"):
            self._kind = "content"
            self._emit(pieces, self._buffer)

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
            end = len(self._buffer) - begun_mark(self._buffer, self._grammar.ends)
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


def _harmony_kind(header: str, mark: str) -> tuple[Kind, str]:
    recipient = re.search(r"\bto=([^\s<]+)", header)
    if recipient:
        return "call", recipient[1].removeprefix("functions.")
    return ("reasoning" if "<|channel|>analysis" in header else "content"), ""


def _harmony_call(name: str, body: str) -> ToolCall | None:
    arguments = json_object(body)
    return None if arguments is None else ToolCall(name, arguments)


def _inkling_kind(header: str, mark: str) -> tuple[Kind, str]:
    kinds: dict[str, Kind] = {"<|content_thinking|>": "reasoning", "<|content_text|>": "content"}
    return kinds.get(mark, "call"), ""


def _inkling_call(name: str, body: str) -> ToolCall | None:
    call = json_object(body) or {}
    named, arguments = call.get("name"), call.get("args", {})
    if not isinstance(named, str) or not named or not isinstance(arguments, dict):
        return None
    return ToolCall(named, cast("dict[str, Any]", arguments))


HARMONY = ChannelGrammar(
    opens=("<|message|>",),
    ends=("<|end|>", "<|call|>", "<|return|>"),
    inner=("<|start|>", "<|channel|>", "<|constrain|>"),
    classify=_harmony_kind,
    read=_harmony_call,
)
INKLING = ChannelGrammar(
    opens=("<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    ends=("<|end_message|>",),
    inner=("<|message_model|>", "<|content_model_end_sampling|>"),
    classify=_inkling_kind,
    read=_inkling_call,
)
GRAMMARS = {"harmony": HARMONY, "inkling": INKLING}


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """The earliest of `marks` in `text`; an empty mark where there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found) if found else (len(text), "")


# Variables: `reasoning_effort`, a number (default: 0.9, as its own renderer's).
_INKLING_TEMPLATE = """
{%- macro block(role, kind, body, name='') -%}
    {{- '<|message_' ~ role ~ '|>' ~ name ~ '<|content_' ~ kind ~ '|>' ~ body ~ '<|end_message|>' -}}
{%- endmacro -%}
{%- set ns = namespace(leading=true, name='', tools=[]) -%}
{%- for tool in tools or [] -%}{%- set ns.tools = ns.tools + [dict(tool.function, type='function')] -%}{%- endfor -%}
{%- for message in messages -%}
    {%- if ns.leading and message.role != 'system' -%}
        {%- set ns.leading = false -%}
        {%- if tools -%}
            {{- block('system', 'xml', ns.tools | tojson(separators=(',', ':'), sort_keys=true), 'tool_declare') -}}
        {%- endif -%}
        {{- block('system', 'text', 'Thinking effort level: ' ~ (reasoning_effort or 0.9)) -}}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.reasoning_content -%}{{- block('model', 'thinking', message.reasoning_content) -}}{%- endif -%}
        {%- if message.content -%}{{- block('model', 'text', message.content) -}}{%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments | tojson(separators=(',', ':'), sort_keys=true) -%}
            {%- set body = '{"name":' ~ (call.function.name | tojson) ~ ',"args":' ~ arguments ~ '}' -%}
            {{- block('model', 'invoke_tool_json', body, call.function.name) -}}
        {%- endfor -%}
        {{- '<|content_model_end_sampling|>' -}}
    {%- elif message.role == 'tool' -%}
        {%- set ns.name = message.name or '' -%}
        {%- for earlier in messages[:loop.index0] -%}
            {%- for call in earlier.tool_calls or [] if call.id == message.tool_call_id -%}
                {%- set ns.name = call.function.name -%}
            {%- endfor -%}
        {%- endfor -%}
        {{- block('tool', 'text', message.content, ns.name) -}}
    {%- else -%}
        {{- block(message.role, 'text', message.content) -}}
    {%- endif -%}
{%- endfor -%}
"""

GPT_OSS = Family(
    name="gpt-oss",
    close="<|end|>",
    stops=("<|return|>", "<|call|>"),
    channels="harmony",
    late_system="fold",  # its template drops them
    reasoning_field="thinking",
)
INKLING_FAMILY = Family(
    name="inkling",
    close="<|end_message|>",
    stops=("<|content_model_end_sampling|>",),
    channels="inkling",
    template=_INKLING_TEMPLATE,
)
FAMILIES = (GPT_OSS, INKLING_FAMILY)
