"""What became of every group issued, from the ledger: fates, wasted tokens, discarded groups to read."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miles_rollout.fates import Fate

from miles_core.durable.spool import SpoolAddress, SpoolError, read_group

from .conversations import ShownEpisode, pick_episodes

ORDER = (Fate.TRAINED, Fate.FILTERED, Fate.STALE, Fate.FAILED, Fate.ABORTED, Fate.BUFFERED, Fate.IN_FLIGHT)
MOST_DISCARDS, EXAMPLES, MOST_EXAMPLES = 12, 2, 12
"""Fates and reasons in the table of discards; groups shown of each, the newest ones, and in all."""


@dataclass(frozen=True, slots=True)
class FateTotals:
    """All groups of one fate and one reason."""

    fate: Fate
    reason: str
    groups: int
    episodes: int
    """Recorded ones; a group that never finished has none."""
    rewarded: int
    mean_reward: float | None
    tokens: int
    """Sampled by the policy."""
    masked_tokens: int
    """Of them in episodes that were too old and counted for the baseline alone."""
    dropped_tokens: int
    """Of them in groups that a step trained which a rewind left behind."""

    @property
    def name(self) -> str:
        return f"{self.fate}: {self.reason}" if self.reason not in ("", self.fate) else str(self.fate)

    @property
    def is_discarded(self) -> bool:
        return self.fate.is_final and self.fate is not Fate.TRAINED


@dataclass(frozen=True, slots=True)
class RunFates:
    """What became of everything issued, and of the tokens that were sampled for it."""

    totals: Sequence[FateTotals] = ()
    """By fate in the order of `ORDER`, the most frequent reason first."""
    failed_attempts: int = 0
    """Attempts that were repeated. What they had sampled is not recorded."""
    failed_seconds: float = 0.0
    """That they took."""

    @property
    def issued(self) -> int:
        return sum(total.groups for total in self.totals)

    @property
    def sampled(self) -> int:
        """Tokens of all recorded episodes."""
        return sum(total.tokens for total in self.totals)

    @property
    def wasted(self) -> int:
        """Sampled tokens that no surviving step trained and none will."""
        return sum(tokens for _, tokens, _ in self.causes())

    @property
    def wasted_share(self) -> float | None:
        return self.wasted / self.sampled if self.sampled else None

    @property
    def trained(self) -> int:
        """Tokens of groups that the surviving steps trained, those that were too old left out."""
        return sum(total.tokens - total.masked_tokens for total in self.of(Fate.TRAINED))

    @property
    def retrained(self) -> int:
        """Tokens that a step trained which was taken back, and a surviving one again: time lost, no data."""
        return sum(total.dropped_tokens for total in self.of(Fate.TRAINED))

    def of(self, fate: Fate) -> list[FateTotals]:
        return [total for total in self.totals if total.fate is fate]

    def by_fate(self) -> dict[Fate, list[FateTotals]]:
        return {fate: totals for fate in ORDER if (totals := self.of(fate))}

    def causes(self) -> list[tuple[str, int, Fate | None]]:
        """The wasted tokens by cause, the worst first, with the fate of their groups where that is the cause."""
        masked = sum(total.masked_tokens for total in self.of(Fate.TRAINED))
        gone = [total for total in self.totals if total.is_discarded]
        causes = [
            ("too old: counted for the baseline alone", masked, None),
            ("taken back by a rewind, then not trained", sum(total.dropped_tokens for total in gone), None),
            *((total.name, total.tokens - total.dropped_tokens, total.fate) for total in gone),
        ]
        return sorted((cause for cause in causes if cause[1]), key=lambda cause: -cause[1])


@dataclass(frozen=True, slots=True)
class Discard:
    """Discarded groups of one fate and reason, and some of them to read."""

    totals: FateTotals
    examples: Sequence[ShownEpisode]
    missing: str = ""
    """Why an example cannot be shown."""


def read_fates(db: sqlite3.Connection) -> RunFates:
    totals = db.execute(
        "SELECT fate, reason, count(DISTINCT number), count(episode), count(reward), avg(reward), "
        "coalesce(sum(loss_tokens), 0), coalesce(sum(loss_tokens * is_masked), 0), coalesce(sum(loss_tokens * "
        "(number IN (SELECT number FROM step_groups WHERE NOT is_live))), 0) "
        "FROM groups LEFT JOIN episodes USING (number) GROUP BY fate, reason ORDER BY 3 DESC, reason"
    )
    found = sorted((FateTotals(Fate(fate), *rest) for fate, *rest in totals), key=lambda one: ORDER.index(one.fate))
    return RunFates(found, *db.execute("SELECT count(*), coalesce(sum(seconds), 0) FROM attempts").fetchone())


def read_discards(db: sqlite3.Connection, fates: RunFates, trajectories: Path) -> list[Discard]:
    """The most frequent kinds of discarded groups, with examples from the spool."""
    gone = sorted((total for total in fates.totals if total.is_discarded), key=lambda total: -total.groups)
    limit = max(min(EXAMPLES, MOST_EXAMPLES // max(len(gone[:MOST_DISCARDS]), 1)), 1)
    return [_discard(db, totals, trajectories, limit) for totals in gone[:MOST_DISCARDS]]


def _discard(db: sqlite3.Connection, totals: FateTotals, trajectories: Path, limit: int) -> Discard:
    fate = f"{totals.fate} ({totals.reason})" if totals.reason not in ("", totals.fate) else str(totals.fate)
    rows = db.execute(
        "SELECT group_id, file, offset FROM groups JOIN segments USING (segment) WHERE fate = ? AND reason = ? "
        "ORDER BY number DESC LIMIT ?",
        (totals.fate, totals.reason, limit),
    )
    examples: list[ShownEpisode] = []
    try:
        for name, file, offset in rows:
            group = read_group(trajectories, SpoolAddress(file=file, offset=offset))
            shown = pick_episodes([(group, fate)])[:EXAMPLES]
            examples += [replace(one, label=f"group {name}, {one.label}") for one in shown]
    except (SpoolError, OSError) as error:
        return Discard(totals, examples, missing=str(error))
    return Discard(totals, examples)
