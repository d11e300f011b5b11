"""`trajectories/index.jsonl`: one line for each group that reached its final fate, with the place of its record."""

from __future__ import annotations

import json
from pathlib import Path

from miles_rollout.fates import FateEvent
from miles_tito.summary import GroupRef

INDEX = "index.jsonl"


class FateIndex:
    """Observes the buffer. A line is on disk before the buffer acts on the fate."""

    def __init__(self, trajectories: Path) -> None:
        self._file = (trajectories / INDEX).open("a", encoding="utf-8")
        self._refs: dict[str, GroupRef] = {}

    async def spooled(self, ref: GroupRef) -> None:
        """A finished group is durable in its worker's spool; remember where until its fate is known."""
        self._refs[ref.id] = ref

    def __call__(self, event: FateEvent) -> None:
        if not event.fate.is_final:
            return
        ref = self._refs.pop(event.group_id, None)
        line = {
            "group": event.group_id,
            "prompt": event.prompt_id,
            "fate": str(event.fate),
            "reason": event.reason,
            "version": event.version,
            "retry_of": event.retry_of,
            "rewards": list(ref.rewards) if ref else None,
            "spool": list(ref.metadata["spool"]) if ref and "spool" in ref.metadata else None,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
