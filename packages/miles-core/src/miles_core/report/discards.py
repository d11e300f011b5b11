"""Discarded rollouts: how many for which reason, and a few of them to read."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_rollout.fates import Fate
from miles_tito.records import Group

from miles_core.durable.spool import SpoolAddress, SpoolError, read_group

from .conversations import Shown, episode, pick
from .fates import Ended, Fates
from .markup import card, count, plural, section, table
from .text import safe

MOST_REASONS, EXAMPLES = 12, 2
"""Rows of the table; groups shown of each, the newest ones."""
MOST_EXAMPLES = 12
"""Groups shown in all."""
_DISCARDED = (Fate.FILTERED, Fate.STALE, Fate.FAILED, Fate.ABORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """Some discarded groups of one fate and reason."""

    ended: Ended
    examples: Sequence[Shown]
    missing: str = ""
    """Why an example cannot be shown."""


def read_discards(db: sqlite3.Connection, fates: Fates, trajectories: Path) -> list[Discarded]:
    """The most frequent kinds of discarded groups, with examples from the spool."""
    kinds = sorted((e for fate in _DISCARDED for e in fates.of(fate)), key=lambda e: -e.groups)[:MOST_REASONS]
    limit = min(EXAMPLES, max(MOST_EXAMPLES // max(len(kinds), 1), 1))
    found: list[Discarded] = []
    for ended in kinds:
        examples, missing = _examples(db, ended, trajectories, limit=limit)
        found.append(Discarded(ended=ended, examples=examples, missing=missing))
    return found


def _examples(db: sqlite3.Connection, ended: Ended, trajectories: Path, *, limit: int) -> tuple[list[Shown], str]:
    examples: list[Shown] = []
    fate = f"{ended.fate}{f' ({ended.reason})' if ended.reason and ended.reason != ended.fate else ''}"
    rows = db.execute(
        "SELECT group_id, file, offset FROM groups JOIN segments USING (segment) WHERE fate = ? AND reason = ? "
        "ORDER BY number DESC LIMIT ?",
        (ended.fate, ended.reason, limit),
    )
    for name, file, offset in rows:
        try:
            group = read_group(trajectories, SpoolAddress(file=file, offset=offset))
        except (SpoolError, OSError) as error:
            return examples, str(error)
        examples += [replace(shown, label=f"group {name}, {shown.label}") for shown in _of(group, fate)]
    return examples, ""


def _of(group: Group, fate: str) -> list[Shown]:
    """One or two of its episodes; one that has no conversation at all where none has."""
    shown = pick([(group, fate)])[:EXAMPLES]
    if not shown and group.episodes:
        first = group.episodes[0]
        shown = [Shown(episode=first, label="without a conversation", fate=fate, siblings=len(group.episodes))]
    return shown


def discards_section(discards: Sequence[Discarded], tokenizer: Any) -> str:
    if not discards:
        return ""
    rows = [
        [
            str(d.ended.fate),
            d.ended.reason or "\N{EN DASH}",
            count(d.ended.groups),
            count(d.ended.episodes),
            count(d.ended.episodes - d.ended.rewarded),
            "\N{EN DASH}" if d.ended.mean_reward is None else f"{d.ended.mean_reward:.3f}",
            count(d.ended.tokens),
        ]
        for d in discards
    ]
    columns = ["fate", "reason", "groups", "episodes", "without reward", "mean reward", "tokens"]
    missing = {d.missing: None for d in discards if d.missing}
    notes = "".join(f'<p class="note">{safe(text)}</p>' for text in missing)
    examples = "".join(episode(shown, tokenizer) for d in discards for shown in d.examples)
    note = f"{plural(sum(d.ended.groups for d in discards), 'group')} that no step trained. The newest ones are below."
    shown = card(table(columns, rows, numbers=range(2, 7)))
    return section("Discarded rollouts", note, shown, notes, examples, kind="conversations")
