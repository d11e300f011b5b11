"""What a finished run left: on disk, and in what the scripts saw of it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_tito.records import Prompt

from .record import Record, WeightTree
from .trainers import TrainerState, read_state


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that a finished run left."""

    config: Config
    run_dir: RunDir
    record: Record
    prompts: Sequence[Prompt]

    @cached_property
    def final(self) -> TrainerState:
        """Of the weights that were exported: the surviving lineage."""
        return read_state(self.run_dir.checkpoints / "final")

    @cached_property
    def weights(self) -> WeightTree:
        return self.record.weights()

    @cached_property
    def fates(self) -> dict[str, str]:
        """Group id -> fate, in the order of issue."""
        return dict(self.rows("SELECT group_id, fate FROM groups ORDER BY number"))

    @cached_property
    def changes(self) -> list[tuple[str, str]]:
        """Group id and what happened to it, in order."""
        return self.rows("SELECT group_id, what FROM changes JOIN groups USING (number) ORDER BY change")

    def rows(self, statement: str) -> list[Any]:
        db = sqlite3.connect(f"file:{self.run_dir.ledger}?mode=ro", uri=True)
        try:
            return db.execute(statement).fetchall()
        finally:
            db.close()

    def faults(self) -> Counter[str]:
        """Kinds of faults that happened."""
        return Counter(fields["kind"] for _, fields in self.record.entries("fault"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An invariant that does not hold."""

    text: str
    group: str | None = None
    """The group that it shows in."""
