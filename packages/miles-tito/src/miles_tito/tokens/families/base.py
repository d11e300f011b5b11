"""What differs between model families, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of each tool, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete, well-formed tool call that a model wrote."""

    name: str
    arguments: dict[str, Any]
    native_id: str | None = None
    """The id that the model itself sampled, where its format has one."""

    @property
    def arguments_json(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How to force a call: the text around its arguments, with NAME for the tool's."""

    begin: str
    end: str
    style: Literal["json", "qwen_xml", "minimax_xml", "glm_xml"] = "json"
    """How xgrammar writes arguments. Its style for DeepSeek lets calls through that are none."""
    separator: str = "\n"
    """Between two calls."""
    before: str = ""
    """In front of all calls."""
    after: str = ""
    """Behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family writes its tool calls."""

    open: str
    """What begins a block of calls."""
    close: str
    """What ends it; empty: the block runs to the end of the turn."""
    read: Callable[[str, Schemas], Sequence[ToolCall] | None]
    """The calls between the two marks; None where the text is no block of calls, and then it stays text."""
    inner: tuple[str, ...] = ()
    """Tokens that stand between the two."""
    bare: bool = False
    """Whether a whole reply that begins with `{` is a call without marks."""
    shape: CallShape | None = None
    """None where calls cannot be forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFormat:
    """How a family writes an image."""

    placeholder: str
    """The token that stands for one patch of an image; the template writes it once an image."""


LateSystem = Literal["keep", "fold", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model family writes an assistant turn. The chat template says the rest."""

    name: str
    aliases: tuple[str, ...] = ()
    """Further names: models that are written alike."""
    close: str
    """The added token that ends an assistant turn; synthesised after a truncation. Empty where a turn ends with the
    token that opens the next message, as in GLM."""
    stops: tuple[str, ...] = ()
    """Tokens that end a sampled turn in place of `close`; trained where they were sampled, and kept as they are."""
    openers: tuple[str, ...] = ()
    """Without `close`: the tokens that open a message."""
    reasoning: tuple[str, str] | None = None
    """Marks around reasoning at the start of a turn."""
    tool_call: CallFormat | None = None
    channels: Literal["harmony", "inkling"] | None = None
    """A turn is a sequence of messages on channels; says which grammar, and `reasoning` and `tool_call` are unused."""
    late_system: LateSystem = "keep"
    """A system message in mid-chat is written in place, shown as a user message, or refused."""
    alternates: bool = False
    """Whether user and assistant messages must alternate; neighbours of one role are joined by an empty line."""
    string_arguments: bool = False
    """Whether the template wants the arguments of a tool call as JSON text."""
    reasoning_field: str = "reasoning_content"
    """The message field that the template reads reasoning from."""
    parallel_calls: bool = True
    """Whether one turn can hold several tool calls."""
    short_ids: bool = False
    """Whether the template takes tool call ids of 9 letters and digits only."""
    habits: tuple[str, ...] = ()
    """Cases in which this family's own template contradicts itself; a session writes them as in a first turn."""
    template: str | None = None
    """The chat template for model folders that ship none."""
    texts: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Mapping[str, str]] | None = None
    """Tools and template variables to further variables that `template` writes."""
    image: ImageFormat | None = None

    @property
    def takes_tools(self) -> bool:
        """Whether calls can be read from a sampled turn."""
        return self.tool_call is not None or self.channels is not None

    @property
    def ends(self) -> tuple[str, ...]:
        """Tokens that end a sampled turn."""
        return self.stops or (self.close,)
