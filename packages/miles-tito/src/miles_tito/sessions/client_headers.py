"""What a client's headers say about a request, apart from its content.

Known clients name their sub-agents and their own bookkeeping; any other agent may say `x-miles-agent: NAME` and
`x-miles-kind: subagent | compaction | title`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from miles_tito.errors import RequestError

_PURPOSES = ("subagent", "compaction", "title")


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


def _codex(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}  # another client's header of that name says nothing to us
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
