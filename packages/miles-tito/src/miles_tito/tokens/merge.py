"""Exact joins: new messages behind stored ids, never a second encoding of what is already there.

What a template writes after an assistant turn is encoded alone, behind the stored ids:

    stored ids … <close> │ \\n<|im_start|>user\\n … <|im_end|>\\n<|im_start|>assistant\\n │ next turn is sampled here
                         └─ rendered behind a stand-in conversation, cut where its assistant turn ends

The stand-in has the tool calls of the stored turn, since templates name results after them.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np

from miles_tito.errors import TemplateError
from miles_tito.records import Message

from .families.base import Family
from .images import ImageCounter, counter_for, expand, joined, parts_of, runs
from .tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_USER: Message = {"role": "user", "content": "q"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Tools, template variables and date of a conversation: what is in its prompt and is no message."""

    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Template variables, such as `enable_thinking`."""
    now: datetime | None = None
    """The date that templates print, frozen."""


class Joiner:
    """Builds prompt ids for one tokenizer and family: a whole conversation, or new messages behind stored ids.

    Sessions call it before every turn, `supervised_trajectory` for demonstrations.
    """

    def __init__(self, tokenizer: Tokenizer, family: Family, *, count_images: ImageCounter | None = None) -> None:
        """`count_images`: by default as the image processor in the tokenizer's folder does."""
        self._count_images = count_images
        for token in (family.close,) if family.close else family.openers:
            if not tokenizer.is_added(token):
                raise TemplateError(
                    f"Family {family.name} ends a turn with {token!r}, which is no added token of {tokenizer.name}; "
                    "choose the family of this model."
                )
        self.tokenizer = (
            tokenizer if tokenizer.template or not family.template else tokenizer.with_template(family.template)
        )
        self.family = family
        self.close_id = tokenizer.token_id(family.close)
        """The token that ends a turn; None where the next message's opening does."""
        stops = {i for token in family.ends if (i := tokenizer.token_id(token)) is not None}
        self.stop_ids = tuple(sorted({*stops, *tokenizer.eos_ids}))
        """Ids that end a turn, for the engine."""
        self.end_ids = tuple(sorted(stops if self.close_id is None else {*stops, self.close_id}))
        """Ids behind which a turn needs no close token."""
        self._reply = f"qz{secrets.randbelow(10**24):024d}zq"  # no message can hold it

    def start(self, messages: Sequence[Message], setting: Setting) -> np.ndarray:
        """[N] int32 ids of a whole conversation, ready for the assistant's turn."""
        self._check_tools(messages, setting)
        return self._with_images(messages, self.tokenizer.encode_guarded(self.render(messages, setting)))

    def extend(
        self,
        messages: Sequence[Message],
        setting: Setting,
        *,
        last: int | None = None,
        reply: Message | None = None,
    ) -> np.ndarray:
        """[N] int32 ids to put behind an assistant turn: `messages` and the next turn's opening.

        Args:
            last: the last stored id. Where it does not end the turn, as after a truncation, the close token comes
                first. None: nothing ended it.
            reply: the stored turn, whose tool calls `messages` answer.
        """
        self._check_tools(messages, setting)
        tools = setting.tools if self._tools_matter else ()
        text = self._after_reply(messages, setting, tools, reply)
        # Encoded behind the real close token: some tokens swallow the whitespace that follows them.
        ids = self._with_images(messages, self.tokenizer.encode_guarded(text))
        if last is None or last not in self.end_ids:
            return ids
        ids = ids if self.close_id is None else ids[1:]
        return ids[1:] if last == ids[0] else ids  # the template writes it as well

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """What the template may write at the end of an assistant turn, or what opens a message behind it."""
        return (self.family.close, *self.family.stops) if self.family.close else self.family.openers

    def after_turn(self, text: str) -> str | None:
        """What a template wrote from the end of an assistant turn on, its close token first; None without an end."""
        at, end = min(((at, end) for end in self.turn_ends if (at := text.find(end)) >= 0), default=(-1, ""))
        if at < 0:
            return None
        # A call ends with another token than a reply in some families; a stored turn has the one it was sampled with.
        return self.family.close + text[at + len(end) :] if self.family.close else text[at:]

    def render(
        self, messages: Sequence[Message], setting: Setting | None = None, *, generation_prompt: bool = True
    ) -> str:
        """Guarded text of a whole conversation, for `Tokenizer.encode_guarded`."""
        setting = setting or Setting()
        return self._render(self._arrange(messages), setting, setting.tools, generation_prompt=generation_prompt)

    def encode_reply(self, message: Message, setting: Setting) -> np.ndarray:
        """[N] int32 ids of one assistant turn as the template writes it, from behind its opening to its close token.

        Raises:
            TemplateError: the template writes no such turn.
        """
        opening = self.render([_USER], setting)
        whole = self.render([_USER, message], setting, generation_prompt=False)
        body = whole[len(opening) :] if whole.startswith(opening) else self._behind_reasoning(opening, whole)
        ends = (self.family.close, *self.family.stops) if self.family.close else ()
        at, end = max(((body.rfind(end), end) for end in ends), default=(len(body), ""))
        if at < 0 or not body:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} does not write an assistant turn as its opening, the text "
                f"and {' or '.join(map(repr, self.turn_ends))}; it writes {whole[-60:]!r}."
            )
        return self.tokenizer.encode_guarded(body[:at] + end)

    def _behind_reasoning(self, opening: str, whole: str) -> str:
        """What `whole` writes behind an opening that ends with a reasoning mark, where it has another or none."""
        if self.family.reasoning is None:
            return ""
        mark, end = self.family.reasoning
        before, found, _ = opening.rpartition(mark)
        if not found or not whole.startswith(before):
            return ""
        body = whole[len(before) :]
        return body.removeprefix(mark).lstrip() if body.startswith(mark) else f"{end}\n\n{body}"

    def opens_reasoning(self, prompt_ids: np.ndarray) -> bool:
        """Whether a prompt ends inside a reasoning mark, so that the turn sampled behind it starts there."""
        if self.family.reasoning is None:
            return False
        tail = self.tokenizer.decode(prompt_ids[-16:], keep=self.tokenizer.control_ids)
        return tail.rstrip().endswith(self.family.reasoning[0])

    @cached_property
    def lists_tools(self) -> bool:
        """Whether the template shows the list of tools to the model."""
        return self._render([_USER], Setting(), ()) != self._render([_USER], Setting(), (PROBE_TOOL,))

    @cached_property
    def writes_tool_calls(self) -> bool:
        """Whether the template writes the tool calls of an assistant message."""
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": self._reply}}}
        assistant: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self._reply in self._render(self._arrange([_USER, assistant, _USER]), Setting(), ())
        except TemplateError:
            return False

    @cached_property
    def _tools_matter(self) -> bool:
        """Whether the list of tools changes what is written after an assistant turn; mostly not, and it is long."""
        appended: list[list[Message]] = [[_USER], *([[{"role": "tool", "content": "r"}]] * self.writes_tool_calls)]
        setting = Setting()
        return any(self._after_reply(m, setting, ()) != self._after_reply(m, setting, (PROBE_TOOL,)) for m in appended)

    def _with_images(self, messages: Sequence[Message], ids: np.ndarray) -> np.ndarray:
        """`ids` with as many placeholders as each image in `messages` has tokens."""
        counts = self.image_counts(messages)
        return expand(ids, self._placeholder, counts) if counts else ids

    def image_counts(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of each image in `messages`, in their order.

        Raises:
            TemplateError: this family takes no images, or the model in the folder does not.
        """
        images = [image for message in messages for image in message.get("images", [])]
        if not images:
            return []
        if self.family.image is None:
            raise TemplateError(f"Family {self.family.name} takes no images; send text only.")
        count = self._count_images or counter_for(self.tokenizer.name)
        return [count(image["url"]) for image in images]

    def image_starts(self, ids: np.ndarray, counts: Sequence[int]) -> list[int]:
        """Where the images with `counts` tokens begin in prompt ids."""
        return runs(ids, self._placeholder, counts)

    @property
    def _placeholder(self) -> int:
        token = self.family.image.placeholder if self.family.image else ""
        placeholder = self.tokenizer.token_id(token)
        if placeholder is None:
            raise TemplateError(f"{self.tokenizer.name} has no token {token!r}; its model takes no images.")
        return placeholder

    def _check_tools(self, messages: Sequence[Message], setting: Setting) -> None:
        if setting.tools and not self.lists_tools:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} ignores `tools`; describe them in a system message "
                "instead, or give the model folder a template that lists them."
            )
        if any(message.get("tool_calls") for message in messages) and not self.writes_tool_calls:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} drops the `tool_calls` of an assistant message that was "
                "not sampled in this session."
            )

    def _after_reply(
        self, messages: Sequence[Message], setting: Setting, tools: Tools, reply: Message | None = None
    ) -> str:
        """What the template writes for `messages` from the end of an assistant turn on, its close token first."""
        appended = self._arrange(self._with_native_ids(messages, reply), late=True)
        text = self._render([_USER, *self._stand_in(messages, reply), *appended], setting, tools)
        _, found, after = text.rpartition(self._reply)
        is_call = any(message["role"] == "tool" for message in messages)
        rest = self.after_turn(after) if found and (is_call or after.startswith(self.turn_ends)) else None
        if rest is None:
            raise TemplateError(
                f"The chat template of {self.tokenizer.name} does not write an assistant's text followed by "
                f"{' or '.join(map(repr, self.turn_ends))} before [{', '.join(m['role'] for m in messages)}]; it "
                f"writes {after[:40]!r}. Exact joins cannot be guaranteed."
            )
        return rest

    def _stand_in(self, messages: Sequence[Message], reply: Message | None) -> list[Message]:
        """An assistant turn as short as can be, with calls for the tool results that `messages` begin with."""
        plain: Message = {"role": "assistant", "content": self._reply}
        results = next((n for n, m in enumerate(messages) if m["role"] != "tool"), len(messages))
        if not results or not self.writes_tool_calls:
            return [plain]
        known = cast("list[Mapping[str, Any]]", (reply or {}).get("tool_calls", []))
        calls = [
            {
                "id": call.get("native_id") or call.get("id") or f"call{n:05d}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": {"word": self._reply}},
            }
            for n, call in enumerate(known or [_call_for(message) for message in messages[:results]])
        ]
        return self._arrange([{**plain, "tool_calls": calls}], late=True)

    def _with_native_ids(self, messages: Sequence[Message], reply: Message | None) -> list[Message]:
        """Tool results under the call ids that the model sampled; a result of unknown id answers by its place."""
        calls = cast("list[Mapping[str, Any]]", (reply or {}).get("tool_calls", []))
        by_id = {call.get("id"): call for call in calls}
        named: list[Message] = []
        for n, message in enumerate(messages):
            if message["role"] != "tool":
                return [*named, *messages[n:]]
            call = by_id.get(message.get("tool_call_id"), calls[n] if n < len(calls) else None)
            call_id = call and (call.get("native_id") or call.get("id"))
            named.append({**message, "tool_call_id": call_id} if call_id else message)
        return named

    def _arrange(self, messages: Sequence[Message], *, late: bool = False) -> list[Message]:
        """`messages` in the form that this family's template takes.

        Args:
            late: they stand behind an assistant turn, so that no system message is a first one.
        """
        family = self.family
        arranged: list[Message] = []
        for message in messages:
            role = message["role"]
            late = late or role != "system"
            if role == "system" and late and family.late_system != "keep":
                message = self._late_system(message)
            elif role == "assistant":
                message = self._assistant(message)
            elif role == "tool" and family.short_ids:
                message = {**message, "tool_call_id": _short(message.get("tool_call_id", "call"))}
            joins = family.alternates or (family.late_system != "keep" and not late)
            if joins and arranged and arranged[-1]["role"] == message["role"] in ("user", "system"):
                arranged[-1] = joined(arranged[-1], message, "\n\n")
            else:
                arranged.append(message)
        return arranged

    def _late_system(self, message: Message) -> Message:
        if self.family.late_system == "refuse":
            raise TemplateError(
                f"Family {self.family.name} takes system messages at the beginning only; send this one as a user "
                f"message: {message['content'][:60]!r}."
            )
        return {**message, "role": "user"}

    def _assistant(self, message: Message) -> Message:
        family = self.family
        message = dict(message)
        if family.reasoning_field != "reasoning_content" and "reasoning_content" in message:
            message[family.reasoning_field] = message.pop("reasoning_content")
        if "tool_calls" not in message:
            return message
        message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        thinking = message.get(family.reasoning_field)
        if family.channels == "harmony" and thinking and message["content"]:
            # Text before a call has no place of its own in this template.
            message = {**message, family.reasoning_field: f"{thinking}\n{message['content']}", "content": ""}
        return message

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.family.string_arguments:
            function["arguments"] = msgspec.json.encode(function["arguments"]).decode()
        call_id = call.get("native_id") or call.get("id")
        if self.family.short_ids:
            call_id = _short(call_id or "call")
        return {"id": call_id, "type": "function", "function": function} if call_id else {**call, "function": function}

    def _render(
        self, messages: Sequence[Message], setting: Setting, tools: Tools, *, generation_prompt: bool = True
    ) -> str:
        variables = setting.variables
        if self.family.channels == "harmony":  # its template fails on a tool without a description
            tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
        if self.family.texts:
            variables = {**variables, **self.family.texts(self.tokenizer.guard(tools), variables)}
        messages = [
            {**{k: v for k, v in m.items() if k != "images"}, "content": parts_of(m)} if "images" in m else m
            for m in messages
        ]
        return self.tokenizer.render(
            messages, tools=tools, generation_prompt=generation_prompt, now=setting.now, variables=variables
        )


def _call_for(result: Message) -> dict[str, Any]:
    """A call that `result` could be the answer to."""
    call_id = result.get("tool_call_id")
    return {"function": {"name": result.get("name") or "tool"}, **({"id": call_id} if call_id else {})}


def _short(call_id: str) -> str:
    """`call_id` as 9 letters and digits."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    alphabet = string.ascii_letters + string.digits
    digest = hashlib.blake2b(call_id.encode(), digest_size=9).digest()
    return "".join(alphabet[byte % len(alphabet)] for byte in digest)
