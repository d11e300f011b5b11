"""Sampled ids to what the client sees, as they come: text, stop strings cut off, reasoning and tool calls apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .families.base import Family
from .families.parser import Piece, TurnParser
from .records import Message
from .tokenizer import Tokenizer


class TurnReader:
    """Reads one turn; the pieces of all calls add up to `message`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        *,
        tools: bool,
        in_reasoning: bool = False,
        stop: Sequence[str] = (),
    ) -> None:
        # Some tokenizers declare the marks of reasoning and tool calls control tokens; the parser needs them.
        marks = {tokenizer.token_id(mark) for mark in (*(family.reasoning or ()), *(family.tool_call or ()))}
        self._text = tokenizer.decode_stream(keep=frozenset(i for i in marks if i is not None))
        self._parser = TurnParser(family, tools=tools, in_reasoning=in_reasoning)
        self._stop = tuple(stop)
        self._held: str = ""
        """Text that may be the beginning of a stop string."""
        self._stopped = False

    def feed(self, ids: np.ndarray) -> list[Piece]:
        """The pieces that became certain with `ids`."""
        return self._parser.feed(self._cut(self._text.feed(ids)))

    def finish(self) -> list[Piece]:
        """The pieces that were held back."""
        text = self._cut(self._text.finish()) + ("" if self._stopped else self._held)
        self._held = ""
        return self._parser.feed(text) + self._parser.finish()

    def message(self, call_id: str) -> Message:
        """The whole reply; its tool calls are named `<call_id>_<n>`."""
        return self._parser.message(call_id)

    def _cut(self, text: str) -> str:
        if self._stopped or not self._stop:
            return "" if self._stopped else text
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            return text[: min(found)]
        hold = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
