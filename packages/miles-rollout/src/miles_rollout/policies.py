"""What becomes of a group that is too old (keep, drop, retry, mask) or that has failed episodes (keep, drop, retry)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from miles_tito import GroupRef
from miles_tito.shared.plugins import Plugin, resolve

MASKED_EPISODES = "masked_episodes"
"""Key in `GroupRef.metadata`: ids of episodes whose reward counts for the baseline but which are not trained."""


class Verdict(StrEnum):
    """What a stale or failure policy answers about one group."""

    KEEP = "keep"
    DROP = "drop"
    """Discard the group; its prompt comes again with the next epoch."""
    RETRY = "retry"
    """Discard the group and run its prompt again as a new group, at most `group_retries` times."""
    MASK = "mask"
    """Keep the group, train only its fresh episodes; the stale ones keep their place in the baseline."""


class FailurePolicy(Protocol):
    """Decides, when a group is put, about one with failed episodes: keep, drop or retry."""

    def __call__(self, ref: GroupRef, *, required_rewards: int) -> Verdict: ...


class StalePolicy(Protocol):
    """Decides about the age of one finished group, when it is put or when a batch is made."""

    def __call__(self, ref: GroupRef, *, staleness: int, max_staleness: int) -> Verdict: ...


def keep(ref: GroupRef, *, staleness: int, max_staleness: int) -> Verdict:
    """Train every group however old; the loss has to correct for it."""
    return Verdict.KEEP


def drop(ref: GroupRef, *, staleness: int, max_staleness: int) -> Verdict:
    """Discard a group with any token older than allowed."""
    return Verdict.DROP if staleness > max_staleness else Verdict.KEEP


def retry(ref: GroupRef, *, staleness: int, max_staleness: int) -> Verdict:
    """Discard a group with any token older than allowed and run its prompt again, so that slow prompts stay."""
    return Verdict.RETRY if staleness > max_staleness else Verdict.KEEP


def mask(ref: GroupRef, *, staleness: int, max_staleness: int) -> Verdict:
    """Train the fresh episodes of a stale group; drop the group when no rewarded episode is fresh."""
    if staleness <= max_staleness:
        return Verdict.KEEP
    stale = set(stale_episodes(ref, staleness=staleness, max_staleness=max_staleness))
    has_fresh = any(e.reward is not None and e.id not in stale for e in ref.episodes)
    return Verdict.MASK if has_fresh else Verdict.DROP


def stale_episodes(ref: GroupRef, *, staleness: int, max_staleness: int) -> tuple[str, ...]:
    """Ids of the episodes with a token older than `max_staleness`; the oldest token of the group is `staleness` old."""
    oldest = ref.oldest_version
    if oldest is None or not ref.is_versioned:  # no episode is known to be fresher than the group
        return tuple(episode.id for episode in ref.episodes)
    version = oldest + staleness
    return tuple(
        e.id for e in ref.episodes if e.oldest_version is not None and version - e.oldest_version > max_staleness
    )


def rest_can_wait(versions: Sequence[int], *, version: int, max_staleness: int, groups_per_step: int) -> bool:
    """Whether groups left behind by a step can still be trained before they are too old.

    Earliest deadline first: a group of version u may be in one of the next `u + max_staleness - version`
    steps. Groups that are too old already are not counted, nothing can save them.

    Args:
        versions: the oldest version of each group that stays behind.
        version: the version that the step trains from.
    """
    steps_left = sorted(left for u in versions if (left := u + max_staleness - version) >= 0)
    return all(index // groups_per_step < left for index, left in enumerate(steps_left))


def keep_rest(ref: GroupRef, *, required_rewards: int) -> Verdict:
    """Train the episodes that have a reward, if there are enough of them; else discard the group."""
    return Verdict.KEEP if ref.num_rewarded >= required_rewards else Verdict.DROP


def drop_incomplete(ref: GroupRef, *, required_rewards: int) -> Verdict:
    """Discard a group that lost any of its episodes, so that every baseline has all its siblings."""
    return Verdict.DROP


def retry_group(ref: GroupRef, *, required_rewards: int) -> Verdict:
    """Train the episodes that have a reward, if there are enough of them; else run the prompt again."""
    return Verdict.KEEP if ref.num_rewarded >= required_rewards else Verdict.RETRY


POLICIES: Mapping[str, StalePolicy] = MappingProxyType({"keep": keep, "drop": drop, "retry": retry, "mask": mask})
"""The built-in stale policies by name."""

FAILURE_POLICIES: Mapping[str, FailurePolicy] = MappingProxyType(
    {"keep": keep_rest, "drop": drop_incomplete, "retry": retry_group}
)
"""The built-in failure policies by name."""


def load_stale_policy(choice: str | Plugin | StalePolicy) -> StalePolicy:
    """The stale policy that a setting names, its arguments bound."""
    return resolve(choice, POLICIES, kind="stale policy", positional=1, keywords=("staleness", "max_staleness"))


def load_failure_policy(choice: str | Plugin | FailurePolicy) -> FailurePolicy:
    """The failure policy that a setting names, its arguments bound."""
    return resolve(choice, FAILURE_POLICIES, kind="failure policy", positional=1, keywords=("required_rewards",))
