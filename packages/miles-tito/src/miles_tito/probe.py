"""Whether a chat template can be joined append-only: proved on a set of cases, or the case that breaks is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from .errors import MilesError
from .families.base import Family
from .merge import PROBE_TOOL, Joiner, Setting
from .records import Message
from .tokenizer import Tokenizer

_REPLY = "qzProbeReplyzq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one case showed."""

    case: str
    level: Literal["ok", "warning", "error"]
    message: str


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": "ox"}}}],
}
_APPENDED: dict[str, list[Message]] = {
    "a user message": [_message("user", "next?")],
    "a tool result": [_message("tool", "found 3")],
    "two tool results": [_message("tool", "found 3"), _message("tool", "found 4")],
    "a tool result and a user message": [_message("tool", "found 3"), _message("user", "next?")],
    "an assistant message not sampled here": [
        _message("user", "next?"),
        _message("assistant", "given"),
        _message("user", "and?"),
    ],
    "unicode and edge whitespace": [_message("user", " \n é漢字👩‍👩‍👧\u200b \n\n")],
    "an empty message": [_message("user", "")],
}
_HISTORIES: dict[str, list[Message]] = {
    "a first turn": [_message("user", "hello?"), _message("assistant", _REPLY)],
    "a system message": [_message("system", "be short"), _message("user", "hello?"), _message("assistant", _REPLY)],
    "three turns": [
        _message("user", "hello?"),
        _message("assistant", "one"),
        _message("user", "go on"),
        _message("assistant", "two"),
        _message("user", "go on"),
        _message("assistant", _REPLY),
    ],
    "a tool turn": [_message("user", "hello?"), _CALL, _message("tool", "r"), _message("assistant", _REPLY)],
}


def probe_template(tokenizer: Tokenizer, family: Family | None = None) -> list[Finding]:
    """One finding a case. Without `family`, the token that ends an assistant turn is read off the template.

    An error means that a session cannot guarantee exact joins. A warning is a habit of the template that a session
    works around or that loses something the user may expect.
    """
    try:
        joiner = Joiner(tokenizer, family or Family(name="auto", close=detect_close(tokenizer)))
    except MilesError as error:
        return [Finding(case="the end of an assistant turn", level="error", message=str(error))]
    findings = [
        _check(f"{what} after {history_name}", partial(_join, joiner, history, appended))
        for history_name, history in _HISTORIES.items()
        if joiner.writes_tool_calls or _CALL not in history
        for what, appended in _APPENDED.items()
    ]
    findings += [
        _check("nothing is dropped", lambda: _kept(joiner)),
        _check("literal control tokens in messages", lambda: _literals(joiner)),
        _check("a system message in mid-chat", lambda: _system(joiner), level="warning"),
        _check("earlier reasoning", lambda: _reasoning(joiner), level="warning"),
        _check("tools", lambda: _tools(joiner), level="warning"),
    ]
    return findings


def detect_close(tokenizer: Tokenizer) -> str:
    """The added token that the template writes right after an assistant's text.

    Raises:
        TemplateError: the template cannot be rendered.
        MilesError: it writes no such token.
    """
    text = tokenizer.render([_message("user", "q"), _message("assistant", _REPLY), _message("user", "q")])
    after = text.partition(_REPLY)[2]
    for size in range(1, min(len(after), 64)):
        if tokenizer.is_added(after[:size]):
            return after[:size]
    raise MilesError(
        f"The chat template of {tokenizer.name} ends an assistant turn with {after[:24]!r}, which begins with no token "
        "of its own; a session could not tell where a turn ends."
    )


def _check(case: str, check: Callable[[], str | None], *, level: Literal["warning", "error"] = "error") -> Finding:
    try:
        problem = check()
    except MilesError as error:
        problem = str(error)
    return Finding(case=case, level=level if problem else "ok", message=problem or "holds")


def _join(joiner: Joiner, history: list[Message], appended: list[Message]) -> str | None:
    """The whole conversation renders to: prompt, reply, close token, and what `extend` gives alone."""
    tokenizer, close = joiner.tokenizer, joiner.family.close
    prompt = tokenizer.render(history[:-1], generation_prompt=True)
    whole = tokenizer.render([*history, *appended], generation_prompt=True)
    expected = prompt + _REPLY + close
    if not whole.startswith(expected):
        at = next((i for i, (a, b) in enumerate(zip(whole, expected, strict=False)) if a != b), len(whole))
        return f"what stands before is rewritten: {expected[at:][:40]!r} becomes {whole[at:][:40]!r}."
    joined = np.concatenate([tokenizer.encode(expected), joiner.extend(appended, Setting(), closed=True)])
    if not np.array_equal(joined, tokenizer.encode(whole)):
        return f"the text appended is not written alike in context: {whole[len(expected) :][:80]!r}."
    return None


def _kept(joiner: Joiner) -> str | None:
    bodies = {"system": "qzSystemzq", "user": "qzUserzq", "assistant": "qzAssistantzq", "tool": "qzToolzq"}
    text = joiner.tokenizer.render([_message(role, body) for role, body in bodies.items()], generation_prompt=True)
    lost = [role for role, body in bodies.items() if body not in text]
    return f"the template drops messages of role {', '.join(lost)}." if lost else None


def _literals(joiner: Joiner) -> str | None:
    tokenizer = joiner.tokenizer
    controls = [tokenizer.token_text(i) for i in sorted(tokenizer.control_ids)]
    conversation = [_message("system", "s"), _message("user", "q"), _message("assistant", "a"), _message("user", "q")]
    hostile = [_message(m["role"], m["content"] + " ".join(controls)) for m in conversation]

    def count(messages: list[Message]) -> int:
        ids = tokenizer.encode_guarded(tokenizer.render(messages))
        return int(np.isin(ids, sorted(tokenizer.control_ids)).sum())

    extra = count(hostile) - count(conversation)
    return f"{extra} control tokens come out of message text." if extra else None


def _system(joiner: Joiner) -> str | None:
    text = joiner.tokenizer.render(
        [_message("user", "q"), _message("assistant", "a"), _message("system", "qzLatezq"), _message("user", "q")]
    )
    return None if "qzLatezq" in text else "the template drops it; a session would lose it."


def _reasoning(joiner: Joiner) -> str | None:
    thought = {**_message("assistant", "a"), "reasoning_content": "qzThoughtzq"}
    before: list[Message] = [_message("user", "q"), thought]
    shown = "qzThoughtzq" in joiner.tokenizer.render(before)
    kept = "qzThoughtzq" in joiner.tokenizer.render([*before, _message("user", "q")])
    if shown and not kept:
        return "the template drops it once a user speaks again; a session keeps what was sampled."
    return None


def _tools(joiner: Joiner) -> str | None:
    without = joiner.tokenizer.render([_message("user", "q")])
    if without == joiner.tokenizer.render([_message("user", "q")], tools=[PROBE_TOOL]):
        return "the template does not show the list of tools to the model."
    if not joiner.writes_tool_calls:
        return "the template drops tool calls of assistant messages that were not sampled in the session."
    return None
