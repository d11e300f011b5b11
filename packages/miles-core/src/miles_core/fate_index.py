"""`trajectories/index.jsonl`: one line for each group that reached its final fate, with the place of its record."""

from __future__ import annotations

import json
from pathlib import Path

from miles_rollout.fates import FateEvent
from miles_tito.summary import GroupRef

INDEX = "index.jsonl"


class FateIndex:
    """Observes the buffer. A line has left this process before the buffer acts on the fate: it survives `kill -9`."""

    def __init__(self, trajectories: Path) -> None:
        self._file = (trajectories / INDEX).open("a", encoding="utf-8")
        self._refs: dict[str, GroupRef] = {}
        self._retries: dict[str, str] = {}
        """Group -> the stale group that it repeats, which only its issue tells."""

    async def spooled(self, ref: GroupRef) -> None:
        """A finished group is durable in its worker's spool; remember where until its fate is known."""
        self._refs[ref.id] = ref

    def __call__(self, event: FateEvent) -> None:
        if event.retry_of is not None:
            self._retries[event.group_id] = event.retry_of
        if not event.fate.is_final:
            return
        ref = self._refs.pop(event.group_id, None)
        line = {
            "group": event.group_id,
            "prompt": event.prompt_id,
            "fate": str(event.fate),
            "reason": event.reason,
            "version": event.version,
            "retry_of": self._retries.pop(event.group_id, None),
            "rewards": list(ref.rewards) if ref else None,
            "spool": list(ref.metadata["spool"]) if ref and "spool" in ref.metadata else None,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
