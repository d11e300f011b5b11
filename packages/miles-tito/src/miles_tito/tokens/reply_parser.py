"""Sampled ids to what the client sees, as they come: text, stop strings cut off, reasoning and tool calls apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from miles_tito.records import Message

from .families.base import Family, Schemas
from .families.channels import GRAMMARS, ChannelParser
from .families.parser import Piece, PieceParser, TurnParser, begun_mark
from .tokenizer import Tokenizer


class TurnReader:
    """Reads the sampled ids of one turn as they come: text, reasoning and tool calls for the client.

    The pieces of all calls add up to `message`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        *,
        tools: Sequence[Mapping[str, Any]],
        in_reasoning: bool = False,
        stop: Sequence[str] = (),
    ) -> None:
        """
        Args:
            tools: as the request lists them; without any, calls are text.
            in_reasoning: the prompt ended inside a reasoning mark.
            stop: what the reply is cut at.
        """
        # Some tokenizers declare the marks of reasoning and tool calls control tokens; the parser needs them.
        marks = {i for mark in _marks(family) if (i := tokenizer.token_id(mark)) is not None}
        self._text = tokenizer.decode_stream(keep=frozenset(marks))
        self._parser: PieceParser = (
            ChannelParser(GRAMMARS[family.channels], tools=bool(tools))
            if family.channels
            else TurnParser(family, tools=bool(tools), in_reasoning=in_reasoning, schemas=tool_schemas(tools))
        )
        self._stop = tuple(stop)
        self._held: str = ""
        """Text that may be the beginning of a stop string."""
        self.stop_string: str | None = None
        """The stop string that ended the reply."""

    def feed(self, ids: np.ndarray) -> list[Piece]:
        """The pieces that became certain with `ids`."""
        return self._parser.feed(self._cut(self._text.feed(ids)))

    def finish(self) -> list[Piece]:
        """The pieces that were held back."""
        text = self._cut(self._text.finish()) + ("" if self.stop_string else self._held)
        self._held = ""
        return self._parser.feed(text) + self._parser.finish()

    def message(self, call_id: str) -> Message:
        """The whole reply; its tool calls are named `<call_id>_<n>`."""
        return self._parser.message(call_id)

    def _cut(self, text: str) -> str:
        if self.stop_string or not self._stop:
            return "" if self.stop_string else text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found)
            return text[:at]
        hold = begun_mark(text, self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _marks(family: Family) -> Sequence[str]:
    if family.channels:
        return GRAMMARS[family.channels].marks
    calls = family.tool_call
    return (*(family.reasoning or ()), *((calls.open, calls.close, *calls.inner) if calls else ()))


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Schemas of the parameters of OpenAI functions, by name."""
    functions = [cast("Mapping[str, Any]", tool.get("function") or tool) for tool in tools]
    return {str(function.get("name")): function.get("parameters") or {} for function in functions}
