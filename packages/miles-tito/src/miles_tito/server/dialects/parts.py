"""Content parts of the dialects that split one message into many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def join_texts(parts: Sequence[dict[str, Any]]) -> Any:
    """Neighbouring texts as one, each on a line of its own; a plain string where there is nothing else."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            before = joined[-1]["text"]
            gap = "" if not before or before.endswith("\n") else "\n"
            joined[-1] = {"type": "text", "text": f"{before}{gap}{part['text']}"}
        else:
            joined.append(part)
    if not joined:
        return ""
    return joined[0]["text"] if len(joined) == 1 and joined[0]["type"] == "text" else joined
