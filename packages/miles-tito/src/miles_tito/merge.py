"""Exact joins: new messages behind stored ids, never a second encoding of what is already there.

An assistant turn ends with a token of its own (the family's `close`). What a template writes after that token is
encoded alone, behind the stored ids:

    stored ids … <close> │ \\n<|im_start|>user\\n … <|im_end|>\\n<|im_start|>assistant\\n │ next turn is sampled here
                         └─ rendered behind a stand-in conversation, cut at its close token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from .errors import TemplateError
from .families.base import Family
from .records import Message
from .tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]

_REPLY = "qzReplyStandInzq"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same for all turns of one conversation and is not a message."""

    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Template variables, such as `enable_thinking`."""
    now: datetime | None = None
    """The date that templates print, frozen."""


class Joiner:
    """Prompt ids of one tokenizer and family."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        close_id = tokenizer.token_id(family.close)
        if close_id is None or not tokenizer.is_added(family.close):
            raise TemplateError(
                f"Family {family.name} ends a turn with {family.close!r}, which is no added token of {tokenizer.name}; "
                "choose the family of this model."
            )
        self.tokenizer = tokenizer
        self.family = family
        self.close_id = close_id
        self.stop_ids = tuple(sorted({close_id, *tokenizer.eos_ids}))
        """Ids that end a turn, for the engine."""

    def start(self, messages: Sequence[Message], setting: Setting) -> np.ndarray:
        """[N] int32 ids of a whole conversation, ready for the assistant's turn."""
        self._check_tools(messages, setting)
        return self.tokenizer.encode_guarded(self._render(messages, setting, setting.tools))

    def extend(self, messages: Sequence[Message], setting: Setting, *, closed: bool) -> np.ndarray:
        """[N] int32 ids to put behind an assistant turn: `messages` and the next turn's opening.

        Args:
            closed: whether the stored ids end with the close token. If not, as after a truncation, it comes first.
        """
        self._check_tools(messages, setting)
        tools = setting.tools if self._tools_matter else ()
        text = self._after_reply(messages, setting, tools)
        # Encoded behind the real close token: some tokens swallow the whitespace that follows them.
        ids = self.tokenizer.encode_guarded(self.family.close + text)
        assert ids[0] == self.close_id, f"{self.family.close!r} is an added token, so it is encoded as itself"
        return ids[1:] if closed else ids

    def opens_reasoning(self, setting: Setting) -> bool:
        """Whether the template itself writes the opening reasoning mark, so that a sampled turn starts inside it."""
        if self.family.reasoning is None:
            return False
        text = self._after_reply([{"role": "user", "content": "q"}], setting, ())
        return text.rstrip().endswith(self.family.reasoning[0])

    @cached_property
    def lists_tools(self) -> bool:
        """Whether the template shows the list of tools to the model."""
        user: list[Message] = [{"role": "user", "content": "q"}]
        return self._render(user, Setting(), ()) != self._render(user, Setting(), (PROBE_TOOL,))

    @cached_property
    def writes_tool_calls(self) -> bool:
        """Whether the template writes the tool calls of an assistant message."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": _REPLY}}}
        messages: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return _REPLY in self._render(messages, Setting(), ())

    @cached_property
    def _tools_matter(self) -> bool:
        """Whether the list of tools changes what is written after an assistant turn; mostly not, and it is long."""
        appended: list[Message] = [{"role": "tool", "content": "r"}, {"role": "user", "content": "q"}]
        setting = Setting()
        return self._after_reply(appended, setting, ()) != self._after_reply(appended, setting, (PROBE_TOOL,))

    def _check_tools(self, messages: Sequence[Message], setting: Setting) -> None:
        if setting.tools and not self.lists_tools and self.family.tool_call is None:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} ignores `tools` and family {self.family.name} has no tool "
                "calls; describe the tools in a system message instead."
            )
        if not self.writes_tool_calls and any(message.get("tool_calls") for message in messages):
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} drops the `tool_calls` of an assistant message that was "
                "not sampled in this session."
            )

    def _after_reply(self, messages: Sequence[Message], setting: Setting, tools: Tools) -> str:
        """What the template writes for `messages` right after an assistant turn's close token."""
        stand_in: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _REPLY}]
        before, reply, after = self._render([*stand_in, *messages], setting, tools).partition(_REPLY)
        del before
        if not reply or not after.startswith(self.family.close) or _REPLY in after:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} does not write an assistant's text followed by "
                f"{self.family.close!r} before [{', '.join(m['role'] for m in messages)}]; it writes {after[:40]!r}. "
                "Exact joins cannot be guaranteed."
            )
        return after[len(self.family.close) :]

    def _render(self, messages: Sequence[Message], setting: Setting, tools: Tools) -> str:
        return self.tokenizer.render(
            messages, tools=tools, generation_prompt=True, now=setting.now, variables=setting.variables
        )
