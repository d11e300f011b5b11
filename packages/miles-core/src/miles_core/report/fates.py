"""The fate waterfall, and sampled tokens that no surviving step trained."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from miles_rollout.fates import Fate

ORDER = (Fate.TRAINED, Fate.FILTERED, Fate.STALE, Fate.FAILED, Fate.ABORTED, Fate.BUFFERED, Fate.IN_FLIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every group of one fate and one reason."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why some sampled tokens were trained by no step."""

    name: str
    tokens: int
    fate: Fate | None
    """Of their groups; None where something else is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """What became of everything issued, and of the tokens that were sampled for it."""

    ended: Sequence[Ended]
    """By fate in the order of `ORDER`, the most frequent reason first."""
    failed_attempts: int
    """Attempts that were repeated. What they had sampled is not recorded."""
    failed_seconds: float
    """That they took."""

    @property
    def issued(self) -> int:
        return sum(ended.groups for ended in self.ended)

    def counts(self) -> dict[str, int]:
        """Groups by final fate, `issued` ones, and those that are open as `in_flight`."""
        known = dict.fromkeys([str(fate) for fate in Fate if fate.is_final], 0)
        known |= {"issued": self.issued, "in_flight": 0}
        for ended in self.ended:
            known[str(ended.fate) if ended.fate.is_final else "in_flight"] += ended.groups
        return known

    @property
    def sampled(self) -> int:
        """Tokens of all recorded episodes."""
        return sum(ended.tokens for ended in self.ended)

    def of(self, fate: Fate) -> list[Ended]:
        return [ended for ended in self.ended if ended.fate is fate]

    def wasted(self) -> list[Cause]:
        """Sampled tokens that no surviving step trained and none will, by cause, the worst first."""
        masked = sum(ended.masked_tokens for ended in self.of(Fate.TRAINED))
        gone = [ended for ended in self.ended if ended.fate.is_final and ended.fate is not Fate.TRAINED]
        causes = [
            Cause(name="too old: counted for the baseline alone", tokens=masked, fate=None),
            Cause(
                name="taken back by a rewind, then not trained", tokens=sum(e.dropped_tokens for e in gone), fate=None
            ),
            *(Cause(name=_name(e), tokens=e.tokens - e.dropped_tokens, fate=e.fate) for e in gone),
        ]
        return sorted((cause for cause in causes if cause.tokens), key=lambda cause: -cause.tokens)

    @property
    def num_wasted(self) -> int:
        return sum(cause.tokens for cause in self.wasted())

    @property
    def retrained(self) -> int:
        """Tokens that a step trained which was taken back, and a surviving one again: time lost, no data."""
        return sum(ended.dropped_tokens for ended in self.of(Fate.TRAINED))


def read_fates(db: sqlite3.Connection) -> Fates:
    groups = {
        (fate, reason): count
        for fate, reason, count in db.execute("SELECT fate, reason, count(*) FROM groups GROUP BY fate, reason")
    }
    episodes = {
        (fate, reason): rest
        for fate, reason, *rest in db.execute(
            "SELECT fate, reason, count(*), count(reward), avg(reward), sum(loss_tokens), "
            "sum(loss_tokens * is_masked), "
            "sum(loss_tokens * (number IN (SELECT number FROM step_groups WHERE NOT is_live))) "
            "FROM groups JOIN episodes USING (number) GROUP BY fate, reason"
        )
    }
    attempts, seconds = db.execute("SELECT count(*), coalesce(sum(seconds), 0) FROM attempts").fetchone()
    ended = [
        _ended(fate, reason, count, episodes.get((fate, reason), (0, 0, None, 0, 0, 0)))
        for (fate, reason), count in groups.items()
    ]
    return Fates(
        ended=sorted(ended, key=lambda e: (ORDER.index(e.fate), -e.groups, e.reason)),
        failed_attempts=attempts,
        failed_seconds=seconds,
    )


def _ended(fate: str, reason: str, groups: int, found: Sequence[float | None]) -> Ended:
    episodes, rewarded, mean, tokens, masked, dropped = found
    return Ended(
        fate=Fate(fate),
        reason=reason,
        groups=groups,
        episodes=int(episodes or 0),
        rewarded=int(rewarded or 0),
        mean_reward=mean,
        tokens=int(tokens or 0),
        masked_tokens=int(masked or 0),
        dropped_tokens=int(dropped or 0),
    )


def _name(ended: Ended) -> str:
    reason = f": {ended.reason}" if ended.reason and ended.reason != ended.fate else ""
    return f"{ended.fate}{reason}"
