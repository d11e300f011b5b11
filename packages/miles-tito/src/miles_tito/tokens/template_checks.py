"""Whether a chat template can be joined append-only: proved on a set of cases, or the case that breaks is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from miles_tito.errors import MilesError, TemplateError
from miles_tito.records import Message

from .families.base import Family
from .merge import PROBE_TOOL, Joiner, Setting

_REPLY = "qzProbeReplyzq"
_LATE = "qzLatezq"

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one case that was tried on a template."""

    case: str
    level: Level
    message: str
    group: str = "chat template"
    """What kind of case it is."""


def said(role: str, content: str) -> Message:
    """A message of text."""
    return {"role": role, "content": content}


def called(*words: str, content: str = "") -> Message:
    """An assistant message that looks each of `words` up."""
    calls = [
        {"id": f"callword{n}", "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
        for n, word in enumerate(words)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: str, n: int = 0) -> Message:
    """The result of call `n` of `called`."""
    return {"role": "tool", "tool_call_id": f"callword{n}", "content": content}


APPENDED: dict[str, list[Message]] = {
    "a user message": [said("user", "next?")],
    "a tool result": [result("found 3")],
    "two tool results": [result("found 3"), result("found 4", 1)],
    "a tool result and a user message": [result("found 3"), said("user", "next?")],
    "an assistant message not sampled here": [
        said("user", "next?"),
        said("assistant", "given"),
        said("user", "and?"),
    ],
    "unicode and edge whitespace": [said("user", " \n é漢字👩‍👩‍👧\u200b \n\n")],
    "an empty message": [said("user", "")],
}
HISTORIES: dict[str, list[Message]] = {
    "a first turn": [said("user", "hello?")],
    "a system message": [said("system", "be short"), said("user", "hello?")],
    "three turns": [
        said("user", "hello?"),
        said("assistant", "one"),
        said("user", "go on"),
        said("assistant", "two"),
        said("user", "go on"),
    ],
    "a tool turn": [said("user", "hello?"), called("ox"), result("r")],
}


def check_template(joiner: Joiner) -> list[Finding]:
    """One finding a case."""
    tools = takes_results(joiner)
    findings = [
        _check(f"{what} after {history_name}", partial(check_join, joiner, history, appended), joiner)
        for history_name, history in HISTORIES.items()
        if (tools and joiner.writes_tool_calls) or history_name != "a tool turn"
        for what, appended in APPENDED.items()
        if tools or appended[0]["role"] != "tool"
        if joiner.family.parallel_calls or what != "two tool results"
    ]
    findings += [
        _check("nothing is dropped", partial(_kept, joiner, tools=tools), joiner),
        _check("literal control tokens in messages", partial(_literals, joiner), joiner),
        _check("a system message in mid-chat", partial(check_late_system, joiner), joiner),
        _check("earlier reasoning", partial(_reasoning, joiner), joiner, level="warning"),
        _check("tools", partial(_tools, joiner, takes_results=tools), joiner, level="warning"),
        _check("one beginning-of-sequence token", partial(_bos, joiner), joiner, level="warning"),
    ]
    return findings


def takes_results(joiner: Joiner) -> bool:
    """Whether the template takes tool results without an error."""
    call = called("ox") if joiner.writes_tool_calls else said("assistant", "a")
    try:
        joiner.render([said("user", "q"), call, result("r")])
    except TemplateError:
        return False
    return True


def check_join(
    joiner: Joiner, history: Sequence[Message], appended: Sequence[Message], setting: Setting | None = None
) -> str | None:
    """What is wrong with `appended` behind a reply to `history`, None for nothing.

    Nothing in front of the reply may change when messages are appended, earlier reasoning excepted: sessions keep what
    was sampled. And what is appended must be written the same alone (as sessions do) and in context (as the template
    means it).
    """
    setting = setting or Setting()
    results = next((n for n, message in enumerate(appended) if message["role"] != "tool"), len(appended))
    calls = results and joiner.writes_tool_calls
    reply = called(*[_REPLY] * results, content=_REPLY) if calls else said("assistant", _REPLY)
    before = _bare(joiner.render(history, setting, generation_prompt=False), joiner.family)
    prompt = joiner.render(history, setting)
    whole = joiner.render([*history, reply, *appended], setting)
    for text in (_bare(prompt, joiner.family), _bare(whole, joiner.family)):
        if not text.startswith(before):
            at = next((i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), len(text))
            return f"what stands before is rewritten: {before[at:][:40]!r} becomes {text[at:][:40]!r}."
    after = whole.rpartition(_REPLY)[2]
    rest = joiner.after_turn(after)
    if rest is None:
        return f"the reply is not followed by {' or '.join(map(repr, joiner.turn_ends))} but by {after[:40]!r}."
    alone = joiner.extend(appended, setting, reply=reply)
    if not np.array_equal(alone, joiner.tokenizer.encode_guarded(rest)):
        return f"the text appended is not written alike in context: {rest[:80]!r}."
    lost = lost_roles(joiner, appended, alone)
    return f"the template drops messages of role {', '.join(lost)} behind a reply." if lost else None


def lost_roles(joiner: Joiner, messages: Sequence[Message], ids: np.ndarray) -> list[str]:
    """The roles of those `messages` whose text is not in `ids`, neither as it is nor as JSON."""
    text = joiner.tokenizer.decode(ids)
    texts = [(message["role"], message["content"].strip()) for message in messages]
    return [role for role, said in texts if said not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text]


def _bare(text: str, family: Family) -> str:
    """`text` without its reasoning and the marks of it."""
    if family.reasoning is None:
        return text
    opening, end = map(re.escape, family.reasoning)
    return re.sub(rf"{opening}(?:(?!{opening}).)*?{end}\s*|{opening}\s*|{end}\s*", "", text, flags=re.DOTALL)


def _check(case: str, check: Callable[[], str | None], joiner: Joiner, *, level: Level = "error") -> Finding:
    try:
        problem = check()
    except MilesError as error:
        problem = str(error)
    if problem and any(habit in case for habit in joiner.family.habits):
        level = "warning"
    return Finding(case=case, level=level if problem else "ok", message=problem or "holds")


def _kept(joiner: Joiner, *, tools: bool) -> str | None:
    bodies = {"system": "qzSystemzq", "user": "qzUserzq", "assistant": "qzAssistantzq", "tool": "qzToolzq"}
    conversation = [said(role, body) for role, body in bodies.items() if role != "tool"]
    if tools:
        call = called("ox") if joiner.writes_tool_calls else said("assistant", "a")
        conversation += [said("user", "q"), call, result(bodies["tool"])]
    text = joiner.render(conversation)
    lost = [role for role, body in bodies.items() if body not in text and (tools or role != "tool")]
    return f"the template drops messages of role {', '.join(lost)}." if lost else None


def _literals(joiner: Joiner) -> str | None:
    tokenizer = joiner.tokenizer
    controls = [tokenizer.token_text(i) for i in sorted(tokenizer.control_ids)][:256]
    conversation = [said("system", "s"), said("user", "q"), said("assistant", "a"), said("user", "q")]
    hostile = [said(m["role"], m["content"] + " ".join(controls)) for m in conversation]

    def count(messages: list[Message]) -> int:
        ids = tokenizer.encode_guarded(joiner.render(messages, generation_prompt=False))
        return int(np.isin(ids, sorted(tokenizer.control_ids)).sum())

    extra = count(hostile) - count(conversation)
    return f"{extra} control tokens come out of message text." if extra else None


def check_late_system(joiner: Joiner) -> str | None:
    """What is wrong with a system message behind an assistant turn, None for nothing."""
    if joiner.family.late_system == "refuse":
        return None
    late = [said("system", _LATE)]
    if _LATE not in joiner.tokenizer.decode(joiner.extend(late, Setting())):
        return "the template drops it or moves it to the top; a session would lose it."
    return check_join(joiner, HISTORIES["a first turn"], [*late, said("user", "q")])


def _reasoning(joiner: Joiner) -> str | None:
    thought = {**said("assistant", "a"), "reasoning_content": "qzThoughtzq"}
    before: list[Message] = [said("user", "q"), thought]
    shown = "qzThoughtzq" in joiner.render(before, generation_prompt=False)
    kept = "qzThoughtzq" in joiner.render([*before, said("user", "q")], generation_prompt=False)
    if shown and not kept:
        return "the template drops it once a user speaks again; a session keeps what was sampled."
    return None


def _tools(joiner: Joiner, *, takes_results: bool) -> str | None:
    if not joiner.lists_tools:
        return "the template does not show the list of tools to the model."
    if not joiner.writes_tool_calls:
        return "the template drops tool calls of assistant messages that were not sampled in the session."
    if not takes_results:
        return "the template does not write tool results."
    return None


def _bos(joiner: Joiner) -> str | None:
    bos = joiner.tokenizer.bos_id
    if bos is None:
        return None
    name = joiner.tokenizer.token_text(bos)
    ids = joiner.start([said("user", "q")], Setting(tools=(PROBE_TOOL,) if joiner.lists_tools else ()))
    count = int((ids == bos).sum())
    if count == 0 and joiner.tokenizer.adds_bos:
        return f"the template does not write {name!r}, which this tokenizer puts before plain text."
    return f"the template writes {name!r} {count} times." if count > 1 else None
