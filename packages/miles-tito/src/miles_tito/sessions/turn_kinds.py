"""Why a turn stands where it does in its session: a turn of the main line, or one of the ways off it.

the same request as a finished, unused turn ──▶ what that turn was, which becomes a retry
a title for the conversation                ──▶ title
a summary of the conversation               ──▶ compaction   ─┐ both sides of
a root that begins with such a summary      ──▶ compaction   ─┘ one compaction
a root of a named agent, or whose prompt an earlier turn wrote into a tool call ──▶ subagent
behind a recorded turn that has no next one ──▶ turn
nothing recorded yet                        ──▶ root
else                                        ──▶ fork

Known clients name their sub-agents and their own bookkeeping in headers; any other agent may say `x-miles-agent: NAME`
and `x-miles-kind: subagent | compaction | title`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError
from miles_tito.records import Message

from .tree import Match, Node, NodeKind, Place, Tree

_PURPOSES = ("subagent", "compaction", "title")

_TITLE = re.compile(
    r"title\b[^.\n]{0,80}\b(?:conversation|thread|chat|coding session)\b"
    r"|\b(?:conversation|thread|chat|coding session)\b[^.\n]{0,40}\btitle\b",
    re.IGNORECASE,
)
"""Instructions of known clients' title calls. A task that asks for the title of something else is none."""
_SUMMARY = re.compile(
    r"context checkpoint compaction|create a (?:detailed|concise|handoff) summary of (?:the|our|this) conversation"
    r"|(?:detailed|handoff) summary for (?:another|the next)|summari[sz]e (?:the|our|this) (?:whole )?conversation"
    r"|detailed prompt for continuing our conversation",
    re.IGNORECASE,
)
"""Instructions of known clients' compactions, in the last message of a history."""
_RESTART = re.compile(
    r"session is being continued from a previous conversation|another language model started to solve this problem"
    r"|(?:summary|compacted version) of (?:the|our) (?:previous|earlier) conversation",
    re.IGNORECASE,
)
"""How known clients open the conversation after a compaction."""
_MIN_PROMPT = 12
"""Characters of a tool call's argument from which on its return as a prompt is no accident."""
_MIN_SUMMARY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the headers of a request say: who sends it, and what for."""

    agent: str | None = None
    """Name of the sub-agent that sends it, None for the main agent. Agents share no turns."""
    purpose: str | None = None
    """ "subagent", "compaction" or "title" where the client says so."""
    window: int = 0
    """How often the client has compacted its context."""
    is_retry: bool = False
    """The client sends it again because no answer came."""


def read_hints(headers: Mapping[str, str]) -> Hints:
    """The hints in `headers`, whose names are in lower case.

    Raises:
        RequestError: `x-miles-kind` names no purpose.
    """
    agent = headers.get("x-miles-agent") or headers.get("x-claude-code-agent-id")
    purpose = headers.get("x-miles-kind")
    if purpose is not None and purpose not in _PURPOSES:
        raise RequestError(
            f"Header x-miles-kind is {purpose!r}; known: {', '.join(_PURPOSES)}.",
            code="invalid_value",
            param="x-miles-kind",
        )
    codex = _codex(headers.get("x-codex-turn-metadata", ""))
    subagent = headers.get("x-openai-subagent", "")
    if "compaction" in (subagent, codex.get("request_kind")) or subagent == "compact":
        purpose = purpose or "compaction"
    elif subagent or codex.get("thread_source") == "subagent":
        agent = agent or headers.get("thread-id") or subagent
    _, _, window = headers.get("x-codex-window-id", "").rpartition(":")
    return Hints(
        agent=agent,
        purpose=purpose,
        window=int(window) if window.isdecimal() else 0,
        is_retry=headers.get("x-stainless-retry-count", "0") != "0",
    )


def classify(messages: Sequence[Message], match: Match, hints: Hints, tree: Tree, *, has_tools: bool) -> Place:
    """The place of a request that `match` attaches to `tree`."""
    siblings = match.node.children if match.node else tree.roots
    repeated = next((n for n in reversed(siblings) if n.is_done and n.asked == match.path and not n.is_used), None)
    if repeated:
        return Place(kind=repeated.kind, origin=repeated.origin, repeats=repeated.id)
    if hints.purpose == "title" or (hints.purpose is None and _asks_for_title(messages, has_tools=has_tools)):
        return Place(kind=NodeKind.TITLE)
    if hints.purpose == "compaction" or (hints.purpose is None and _asks_for_summary(messages)):
        compacted = match.node or tree.match_any(messages)  # some clients leave the tools out here
        return Place(kind=NodeKind.COMPACTION, origin=compacted.id if compacted else None)
    if match.node:
        goes_on = not any(child.kind is NodeKind.TURN for child in siblings)
        return Place(kind=NodeKind.TURN if goes_on else NodeKind.FORK)
    caller = _caller(messages, tree)
    if hints.agent or hints.purpose == "subagent" or caller:
        return Place(kind=NodeKind.SUBAGENT, origin=caller.id if caller else None)
    summary = _summary(messages, hints, tree)
    if summary:
        return Place(kind=NodeKind.COMPACTION, origin=summary.id)
    is_first = not any(root.kind is NodeKind.ROOT for root in tree.roots)
    return Place(kind=NodeKind.ROOT if is_first else NodeKind.FORK)


def _asks_for_title(messages: Sequence[Message], *, has_tools: bool) -> bool:
    if has_tools or any(message["role"] == "assistant" for message in messages):
        return False
    return any(_TITLE.search(message["content"][:4000]) for message in messages)


def _asks_for_summary(messages: Sequence[Message]) -> bool:
    last = messages[-1]
    replied = any(message["role"] == "assistant" for message in messages)
    return replied and last["role"] == "user" and bool(_SUMMARY.search(last["content"][:8000]))


def _summary(messages: Sequence[Message], hints: Hints, tree: Tree) -> Node | None:
    """The summary that these messages begin with."""
    summaries = [n for n in reversed(tree.nodes) if n.kind is NodeKind.COMPACTION and n.is_done]
    users = [message["content"] for message in messages if message["role"] == "user"]
    for node in summaries:
        text = node.message["content"].strip()
        if len(text) >= _MIN_SUMMARY and any(text in content for content in users):
            return node
    if summaries and (hints.window or any(_RESTART.search(content) for content in users)):
        return summaries[0]
    return None


def _caller(messages: Sequence[Message], tree: Tree) -> Node | None:
    """The turn with a tool call that holds the prompt of these messages."""
    if any(message["role"] == "assistant" for message in messages):
        return None
    prompts = [message["content"].strip() for message in messages if message["role"] == "user"]
    for node in reversed(tree.nodes):
        for call in node.message.get("tool_calls", []):
            for text in _strings(call["function"]["arguments"]):
                if len(text) >= _MIN_PROMPT and any(prompt.endswith(text) for prompt in prompts):
                    return node
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _strings(item)


def _codex(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}  # another client's header of that name says nothing to us
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
