"""The rollout settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from miles_tito import Sampling
from miles_tito.shared.plugins import Plugin, check_name, name_of
from miles_tito.shared.settings import SettingError, at_least, require

from .advantages import ADVANTAGES
from .filters import FILTERS
from .policies import FAILURE_POLICIES, POLICIES


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
    stragglers: Literal["overtake", "wait"] = "wait"
    """What a batch does about groups that still run. `wait` holds a batch back as long as a group would become too
    old by it: nothing is lost to age, and long episodes stay in the data. `overtake` takes whatever is finished:
    faster where episodes outlast steps, but those that outlast `max_staleness` steps meet `take_policy`."""
    oversampling: float = 1.0
    """Groups in the making, as a multiple of the `(max_staleness + 1) * groups_per_step` that can be trained in time.
    Above 1 a batch fills sooner, from the groups that finish first; the others stay in the buffer and meet
    `take_policy` when they are too old. Needs `stragglers = "overtake"`."""
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
    retry_backoff_s: float = 1.0
    """Wait before the first further attempt of an episode, give or take a quarter; doubles with each, up to 60 s."""
    partial: Literal["train", "mask"] = "train"
    """Tokens of a trajectory that were sampled before its newest weights came. `train` trains them like the others,
    `mask` keeps them as context only, so that every trajectory is trained on tokens of one version."""
    min_rewards: int | None = None
    """Rewarded episodes that a group needs, else it has failed. By default 2, or 1 where `group_size` is 1."""
    advantage: str | Plugin = "grpo"
    """grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, or an import string. With arguments, like every plug-in
    below: `{ name = "my_pkg.rl:scaled", args = { scale = 2.0 } }`."""
    filter: str | Plugin = "nonzero_spread"
    """nonzero_spread, no_truncated, no_filter, or an import string."""
    failure_policy: str | Plugin = "keep"
    """For groups with failed episodes. `keep` trains the rest if it holds `min_rewards`, `retry` runs the prompt again
    if it does not, `drop` discards the group whatever is left; or an import string."""
    group_retries: int = 3
    """Times in a row that a prompt runs again because a policy said retry; then its group is discarded for good."""
    put_policy: str | Plugin = "mask"
    """For groups that are too old when they finish: keep, drop, retry, mask, or an import string."""
    take_policy: str | Plugin = "mask"
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
        at_least(self, 1, "group_size", "groups_per_step", "max_concurrent_episodes", "max_empty_batches")
        at_least(self, 0, "max_staleness", "retries", "deadline_grace_s", "retry_backoff_s", "group_retries")
        at_least(self, 1, "failure_window", "min_failures")
        require(
            math.isfinite(self.episode_timeout_s) and self.episode_timeout_s > 0,
            "episode_timeout_s",
            self.episode_timeout_s,
            "a positive number of seconds: an episode without a deadline can hold its permit for ever",
        )
        require(0 <= self.max_failure_rate <= 1, "max_failure_rate", self.max_failure_rate, "a share, from 0 to 1")
        if self.min_failures > self.failure_window:
            raise SettingError(
                f"`min_failures` is {self.min_failures} but `failure_window` holds only {self.failure_window} "
                "episodes: the budget could never stop the run. Set `max_failure_rate` to 1 to switch it off."
            )
        require(self.stragglers in ("overtake", "wait"), "stragglers", self.stragglers, "'overtake' or 'wait'")
        require(self.partial in ("train", "mask"), "partial", self.partial, "'train' or 'mask'")
        self._check_oversampling()
        check_name(self.failure_policy, FAILURE_POLICIES, kind="failure policy", key="failure_policy")
        check_name(self.advantage, ADVANTAGES, kind="advantage", key="advantage")
        check_name(self.filter, FILTERS, kind="filter", key="filter")
        check_name(self.put_policy, POLICIES, kind="stale policy", key="put_policy")
        check_name(self.take_policy, POLICIES, kind="stale policy", key="take_policy")
        self._check_group_size()

    @property
    def num_credits(self) -> int:
        """Groups that may be open at once; without oversampling none is issued over `max_staleness` steps ahead."""
        return math.ceil((self.max_staleness + 1) * self.groups_per_step * self.oversampling)

    @property
    def required_rewards(self) -> int:
        """`min_rewards` with its default filled in."""
        return min(2, self.group_size) if self.min_rewards is None else self.min_rewards

    @property
    def trains_stale_groups(self) -> bool:
        """Whether groups may be trained however old they are."""
        return "keep" in (name_of(self.put_policy), name_of(self.take_policy))

    def _check_oversampling(self) -> None:
        require(1 <= self.oversampling < math.inf, "oversampling", self.oversampling, "a finite factor of at least 1")
        if self.oversampling > 1 and self.stragglers == "wait":
            raise SettingError(
                f"`oversampling` is {self.oversampling} but `stragglers` is 'wait', which trains every group in time "
                'and so has no use for more than can be trained. Set `stragglers = "overtake"`, or leave it at 1.'
            )

    def _check_group_size(self) -> None:
        if not 1 <= self.required_rewards <= self.group_size:
            raise SettingError(
                f"`min_rewards` is {self.min_rewards} but `group_size` is {self.group_size}; "
                "it must lie between 1 and the group size."
            )
        if self.group_size > 1:
            return
        if name_of(self.filter) == "nonzero_spread":
            raise SettingError(
                "`group_size` is 1 and `filter` is 'nonzero_spread': one episode has no spread, so every group would "
                'be discarded. Set `filter = "no_filter"`, or a `group_size` of 2 or more.'
            )
        if (name := name_of(self.advantage)) in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
            raise SettingError(
                f"`group_size` is 1 and `advantage` is {name!r}, whose baseline comes from siblings: every advantage "
                'would be 0. Set `advantage = "reinforce_pp"`, or a `group_size` of 2 or more.'
            )
