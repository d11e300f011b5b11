"""Two rules that stop a run with advice: nothing but discarded groups, and too many failed episodes."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

from miles_tito import EpisodeSummary, GroupRef

from miles_rollout.config import RolloutConfig
from miles_rollout.errors import EmptyBatchesError, FailureBudgetError, first_line

STALE = "stale"
"""Reason of a group that grew old while it ran or waited."""
RESUMED_TOO_LATE = "resumed_too_late"
"""Reason of a group that a stop of the run made too old."""
ENGINE_BEHIND = "engine_behind"
"""Reason of a stale group whose tokens are older than its issue, which only an engine with old weights can cause."""


class EmptyBatchGuard:
    """Stops a run whose groups are all discarded, after `max_empty_batches` batches' worth of them in a row."""

    def __init__(self, config: RolloutConfig) -> None:
        self._max_empty_batches = config.max_empty_batches
        self._limit = config.max_empty_batches * config.groups_per_step
        self._reasons: Counter[str] = Counter()
        self._rewards: list[float] = []

    def admitted(self) -> None:
        """A fresh group was worth training: start again from 0."""
        self._reasons.clear()
        self._rewards.clear()

    def discarded(self, ref: GroupRef, reason: str) -> None:
        """Count one group that was filtered, failed, or came from an engine with old weights.

        Age alone does not count: versions grow only where something is trained.

        Raises:
            EmptyBatchesError: that was the last one the run may spend.
        """
        if reason in (STALE, RESUMED_TOO_LATE):
            return
        self._reasons[reason] += 1
        self._rewards += (reward for reward in ref.rewards if reward is not None)
        total = self._reasons.total()
        if total < self._limit:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        raise EmptyBatchesError(
            f"The last {total} groups ({self._max_empty_batches} batches' worth) were all discarded: {reasons}. "
            f"{self._advice()} `max_empty_batches` = {self._max_empty_batches} sets when to stop."
        )

    def _advice(self) -> str:
        if self._reasons.most_common(1)[0][0] == ENGINE_BEHIND:
            return (
                "Their tokens come from weights older than those that the engines were said to hold when the groups "
                "were issued: check that every push reaches every engine before `set_version`."
            )
        if not self._rewards:
            return "No episode got a reward: look at the errors of the episodes first."
        low, high = min(self._rewards), max(self._rewards)
        mean = sum(self._rewards) / len(self._rewards)
        seen = f"Their {len(self._rewards)} rewards have mean {mean:.3g} and range [{low:.3g}, {high:.3g}]."
        if low == high:
            return (
                f"{seen} Check first that the reward can give another value: grade a known right and a known wrong "
                "answer by hand. If it can, the prompts are too hard or too easy for this model: mix in others, "
                "warm up with SFT, raise `group_size` or the temperature. "
                "`filter = 'no_filter'` trains on them all the same."
            )
        return f"{seen} Prompts are either always or never solved: mix in prompts between, or raise `group_size`."


class FailureBudget:
    """Stops a run when too many of its last episodes failed, and names the most common cause."""

    def __init__(self, config: RolloutConfig) -> None:
        self._max_failure_rate = config.max_failure_rate
        self._min_failures = config.min_failures
        self._recent: deque[str | None] = deque(maxlen=config.failure_window)
        """Cause of each failed episode, None for one that went well."""
        self._examples: dict[str, str] = {}

    def record(self, episodes: Iterable[EpisodeSummary]) -> None:
        """Count the final attempts of a finished group.

        Raises:
            FailureBudgetError: the failure rate of the window is above the budget.
        """
        for episode in episodes:
            self._recent.append(self._cause(episode))
        causes = Counter(cause for cause in self._recent if cause is not None)
        failed = causes.total()
        rate = failed / max(len(self._recent), 1)
        if failed < self._min_failures or rate <= self._max_failure_rate:
            return
        cause, count = causes.most_common(1)[0]
        raise FailureBudgetError(
            f"{failed} of the last {len(self._recent)} episodes failed ({rate:.0%}), more than "
            f"`max_failure_rate` = {self._max_failure_rate:.0%} allows. Most common cause ({count} times): "
            f"{self._examples[cause]}. Repair it, or raise `max_failure_rate` if the rest is worth training on."
        )

    def _cause(self, episode: EpisodeSummary) -> str | None:
        if episode.outcome.has_reward:
            return None
        example = f"{episode.outcome}: {first_line(episode.error)}"
        cause = re.sub(r"\d+", "#", example)  # ids, ports and durations differ from case to case of one cause
        self._examples.setdefault(cause, example)
        return cause
