"""What becomes of a finished group: failure policy, filter and put policy, and the take policy when a batch is made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miles_tito import GroupRef
from miles_tito.shared.settings import SettingError

from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import FAILED_BECAUSE
from miles_rollout.fates import Fate
from miles_rollout.filters import load_filter
from miles_rollout.policies import (
    MASKED_EPISODES,
    StalePolicy,
    Verdict,
    load_failure_policy,
    load_stale_policy,
    stale_episodes,
)

from .queue import QueuedGroup
from .stop_rules import ENGINE_BEHIND, RESUMED_TOO_LATE, STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """What the policies decided about a group that is not trained."""

    fate: Fate
    reason: str
    """Short and countable."""
    retry: bool = False
    """Its prompt is to run again."""


class AgeLimit:
    """A stale policy with the staleness that it judges by."""

    def __init__(self, policy: StalePolicy, *, max_staleness: int) -> None:
        self._policy = policy
        self._max_staleness = max_staleness

    def decide(self, group: QueuedGroup, ref: GroupRef, *, version: int) -> GroupRef | Discarded:
        """The group with its stale episodes masked where the policy says so, or why it is discarded."""
        staleness, limit = group.staleness(version), self._max_staleness
        match Verdict(self._policy(ref, staleness=staleness, max_staleness=limit)):
            case Verdict.KEEP:
                return ref
            case Verdict.MASK:
                masked = stale_episodes(ref, staleness=staleness, max_staleness=limit)
                return replace(ref, metadata={**ref.metadata, MASKED_EPISODES: masked})
            case Verdict.DROP | Verdict.RETRY as verdict:
                # A stop made a resumed group old; what is learned must not depend on stops.
                retry = verdict is Verdict.RETRY or group.is_resumed
                return Discarded(fate=Fate.STALE, reason=self._reason(group, version), retry=retry)

    def _reason(self, group: QueuedGroup, version: int) -> str:
        """A group grows old by itself, or its engine sampled with weights older than the group's issue."""
        if group.is_resumed:
            return RESUMED_TOO_LATE
        return STALE if version - group.issued_version > self._max_staleness else ENGINE_BEHIND


class Admission:
    """The policies that a configuration names, in the order in which `GroupBuffer` asks them."""

    def __init__(self, config: RolloutConfig) -> None:
        self._failure_policy = load_failure_policy(config.failure_policy)
        self._named_policy = config.failure_policy
        self._required_rewards = config.required_rewards
        self._filter = load_filter(config.filter)
        self._at_put = AgeLimit(load_stale_policy(config.put_policy), max_staleness=config.max_staleness)
        self.at_take = AgeLimit(load_stale_policy(config.take_policy), max_staleness=config.max_staleness)

    def decide(self, group: QueuedGroup, ref: GroupRef, *, version: int) -> GroupRef | Discarded:
        """A group that has just finished, as it is admitted, or why it is discarded."""
        if (failed := self._failed(ref)) is not None:
            return failed
        if (reason := self._filter(ref)) is not None:
            return Discarded(fate=Fate.FILTERED, reason=reason)
        return self._at_put.decide(group, ref, version=version)

    def _failed(self, ref: GroupRef) -> Discarded | None:
        """Ask what becomes of a group with failed episodes."""
        verdict = Verdict.KEEP
        if ref.num_rewarded < len(ref.episodes):
            verdict = self._failure_policy(ref, required_rewards=self._required_rewards)
        if verdict == Verdict.MASK:
            raise SettingError(
                f"`failure_policy` = {self._named_policy!r} answered 'mask' for group {ref.id}; failed episodes are "
                "never trained, so it answers keep, drop or retry."
            )
        has_enough = ref.num_rewarded >= self._required_rewards
        if verdict == Verdict.KEEP and has_enough:
            return None
        reason = "incomplete" if has_enough else str(ref.metadata.get(FAILED_BECAUSE, "too_few_rewards"))
        return Discarded(fate=Fate.FAILED, reason=reason, retry=verdict == Verdict.RETRY)
