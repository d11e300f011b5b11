"""The rollout settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from miles_tito import Sampling

from .advantages import ADVANTAGES
from .errors import RolloutConfigError
from .filters import FILTERS
from .policies import POLICIES
from .registry import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How groups are sampled, admitted and handed to training."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    group_size: int = 8
    """Sibling episodes of one prompt, which share a baseline."""
    groups_per_step: int = 16
    """Groups in one optimizer batch; every batch has exactly this many."""
    max_staleness: int = 1
    """Versions that a trained token may be behind the weights it trains; 0 is synchronous training."""
    stragglers: Literal["overtake", "wait"] = "overtake"
    """What a batch does about groups that still run. `overtake` takes whatever is finished: fastest, but episodes
    that outlast `max_staleness` steps meet `take_policy`. `wait` holds a batch back as long as a group would become
    too old by it: nothing is lost to age, and long episodes stay in the data."""
    max_concurrent_episodes: int = 256
    """Episodes that run at once, over all workers."""
    sampling: Sampling = field(default_factory=Sampling)
    """How the policy samples; sessions pin it."""
    episode_timeout_s: float = 600.0
    """Deadline of one attempt of an episode, from the moment it holds its permit."""
    deadline_grace_s: float = 5.0
    """Time after the deadline for the environment to end by itself; then it is cancelled."""
    retries: int = 1
    """Further attempts of an episode that ended with an infrastructure failure."""
    min_rewards: int | None = None
    """Rewarded episodes that a group needs, else it has failed. By default 2, or 1 where `group_size` is 1."""
    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or an import string."""
    filter: str = "nonzero_spread"
    """nonzero_spread, no_truncated, no_filter, or an import string."""
    put_policy: str = "drop"
    """For groups that are too old when they finish: keep, drop, retry, mask, or an import string."""
    take_policy: str = "drop"
    """For groups that are too old when a batch is made: keep, drop, retry, mask, or an import string."""
    max_empty_batches: int = 8
    """Batches' worth of discarded groups in a row after which the run stops with advice."""
    max_failure_rate: float = 0.5
    """Share of failed episodes in the window above which the run stops; 1 never stops it."""
    failure_window: int = 256
    """Latest episodes that the failure rate is taken over."""
    min_failures: int = 16
    """Failures below this number never stop a run."""

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_step", "max_concurrent_episodes", "max_empty_batches"):
            self._at_least(name, 1)
        for name in ("max_staleness", "retries", "deadline_grace_s"):
            self._at_least(name, 0)
        self._at_least("failure_window", 1)
        self._at_least("min_failures", 1)
        if not (math.isfinite(self.episode_timeout_s) and self.episode_timeout_s > 0):
            raise RolloutConfigError(
                f"`episode_timeout_s` is {self.episode_timeout_s}; it must be a positive number of seconds: "
                "an episode without a deadline can hold its permit for ever."
            )
        if not 0 <= self.max_failure_rate <= 1:
            raise RolloutConfigError(
                f"`max_failure_rate` is {self.max_failure_rate}; it is a share and lies in [0, 1]."
            )
        if self.min_failures > self.failure_window:
            raise RolloutConfigError(
                f"`min_failures` is {self.min_failures} but `failure_window` holds only {self.failure_window} "
                "episodes: the budget could never stop the run. Set `max_failure_rate` to 1 to switch it off."
            )
        if self.stragglers not in ("overtake", "wait"):
            raise RolloutConfigError(f"`stragglers` is {self.stragglers!r}; it is 'overtake' or 'wait'.")
        check_name(self.advantage, ADVANTAGES, kind="advantage")
        check_name(self.filter, FILTERS, kind="filter")
        check_name(self.put_policy, POLICIES, kind="stale policy")
        check_name(self.take_policy, POLICIES, kind="stale policy")
        self._check_group_size()

    @property
    def num_credits(self) -> int:
        """Groups that may be open at once, so that none is issued more than `max_staleness` steps ahead."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def required_rewards(self) -> int:
        """`min_rewards` with its default filled in."""
        return min(2, self.group_size) if self.min_rewards is None else self.min_rewards

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not value >= least:
            raise RolloutConfigError(f"`{name}` is {value}; it must be at least {least}.")

    def _check_group_size(self) -> None:
        if not 1 <= self.required_rewards <= self.group_size:
            raise RolloutConfigError(
                f"`min_rewards` is {self.min_rewards} but `group_size` is {self.group_size}; "
                "it must lie between 1 and the group size."
            )
        if self.group_size > 1:
            return
        if self.filter == "nonzero_spread":
            raise RolloutConfigError(
                "`group_size` is 1 and `filter` is 'nonzero_spread': one episode has no spread, so every group would "
                'be discarded. Set `filter = "no_filter"`, or a `group_size` of 2 or more.'
            )
        if self.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
            raise RolloutConfigError(
                f"`group_size` is 1 and `advantage` is {self.advantage!r}, whose baseline comes from siblings: every "
                'advantage would be 0. Set `advantage = "reinforce_pp"`, or a `group_size` of 2 or more.'
            )
