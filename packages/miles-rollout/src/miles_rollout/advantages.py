"""Advantages from the rewards of sibling episodes.

Subscripts: B groups of a batch, G episodes of a group (ragged). An advantage function maps rewards_BG to
advantages_BG. A reward of None (the episode failed) shifts no baseline and gets the advantage None: it is not
trained. Everything counts episodes, however many trajectories an episode has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from miles_tito import Group, GroupRef, Sample
from miles_tito.records.episodes import to_samples
from miles_tito.shared.plugins import Plugin, resolve

from .errors import AdvantageError
from .filters import has_spread
from .policies import MASKED_EPISODES

Rewards = Sequence[Sequence["float | None"]]
AdvantageRows = list[list["float | None"]]
Advantages = Callable[[Rewards], AdvantageRows]
"""Maps the rewards of a batch of groups to advantages of the same shape."""


def grpo(rewards_BG: Rewards) -> AdvantageRows:
    """Standardise within each group: A_i = (r_i - mean(r)) / std(r).

    GRPO (arXiv:2402.03300 §4.1.2) with the population std, so |A_i| ≤ sqrt(G - 1). All siblings equal, or one
    alone: 0.
    """
    return [_per_group(rewards_G, _standardise) for rewards_G in rewards_BG]


def dr_grpo(rewards_BG: Rewards) -> AdvantageRows:
    """Center within each group: A_i = r_i - mean(r).

    Dr. GRPO (arXiv:2503.20783 §3.2) drops the division by std(r), which favours groups that are nearly all
    right or all wrong.
    """
    return [_per_group(rewards_G, _center) for rewards_G in rewards_BG]


def rloo(rewards_BG: Rewards) -> AdvantageRows:
    """Subtract the mean of the other siblings: A_i = r_i - mean(r_j, j ≠ i) = G/(G - 1) · (r_i - mean(r)).

    RLOO (arXiv:2402.14740 §3.2). There is no division by a leave-one-out std: it is 0 whenever one sibling alone
    differs. One sibling alone: 0.
    """

    def leave_one_out(rewards_G: list[float]) -> list[float]:
        scale = len(rewards_G) / max(len(rewards_G) - 1, 1)
        return [scale * centered for centered in _center(rewards_G)]

    return [_per_group(rewards_G, leave_one_out) for rewards_G in rewards_BG]


def reinforce_pp(rewards_BG: Rewards) -> AdvantageRows:
    """Standardise over the whole batch: A_i = (r_i - mean_batch(r)) / std_batch(r).

    REINFORCE++ (arXiv:2501.03262 §3), over episodes rather than tokens, so that a long episode weighs no more in
    the baseline. Needs no siblings.
    """
    return _over_batch(rewards_BG, _standardise)


def reinforce_pp_baseline(rewards_BG: Rewards) -> AdvantageRows:
    """Center within each group, then standardise over the batch.

    REINFORCE++-baseline (arXiv:2501.03262 §3): the group gives the baseline, the batch the scale.
    """
    return _over_batch(dr_grpo(rewards_BG), _standardise)


ADVANTAGES: Mapping[str, Advantages] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
    }
)
"""The built-in advantage functions by name."""


def load_advantage(choice: str | Plugin | Advantages) -> Advantages:
    """The advantage function that a setting names, its arguments bound."""
    return resolve(choice, ADVANTAGES, kind="advantage", positional=1)


def advantages_by_episode(
    groups: Sequence[Group | GroupRef], *, advantage: str | Plugin | Advantages = "grpo"
) -> dict[str, float | None]:
    """The advantage of each episode of a batch, by episode id; None for an episode that is not trained.

    Works on references as well as on groups, so the driver can compute advantages without the arrays. Episodes
    that a stale policy masked count for the baseline and get None.

    Raises:
        AdvantageError: a group comes twice, a reward is not finite, or `advantage` returned another shape.
    """
    _check_distinct(groups)
    rewards_BG = [[episode.reward for episode in group.episodes] for group in groups]
    _check_rewards(groups, rewards_BG)
    advantages_BG = load_advantage(advantage)(rewards_BG)
    _check_shape(rewards_BG, advantages_BG)
    by_episode: dict[str, float | None] = {}
    for group, advantages_G in zip(groups, advantages_BG, strict=True):
        masked = group.metadata.get(MASKED_EPISODES, ())
        for episode, value in zip(group.episodes, advantages_G, strict=True):
            by_episode[episode.id] = None if episode.id in masked else value
    return by_episode


def assign_advantages(
    groups: Group | Sequence[Group], *, advantage: str | Plugin | Advantages = "grpo"
) -> list[Sample]:
    """Training samples of one group or of a batch, one for each trained trajectory, in the order given."""
    batch = [groups] if isinstance(groups, Group) else list(groups)
    by_episode = advantages_by_episode(batch, advantage=advantage)
    samples: list[Sample] = []
    for group in batch:
        for episode in group.episodes:
            value = by_episode[episode.id]
            if value is not None:
                samples += to_samples(episode, value)
    return samples


def _per_group(
    rewards_G: Sequence[float | None], transform: Callable[[list[float]], list[float]]
) -> list[float | None]:
    """Apply `transform` to the rewards that exist and put None back where there was none."""
    transformed = iter(transform([reward for reward in rewards_G if reward is not None]))
    return [None if reward is None else next(transformed) for reward in rewards_G]


def _over_batch(rewards_BG: Rewards, transform: Callable[[list[float]], list[float]]) -> AdvantageRows:
    flat = iter(_per_group([reward for rewards_G in rewards_BG for reward in rewards_G], transform))
    return [[next(flat) for _ in rewards_G] for rewards_G in rewards_BG]


def _center(rewards: list[float]) -> list[float]:
    """r - mean(r); exactly 0 where rewards differ by no more than rounding."""
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    return [reward - mean for reward in rewards]


def _standardise(rewards: list[float]) -> list[float]:
    """(r - mean(r)) / std(r), or all 0 where nothing differs; |result| ≤ sqrt(n - 1)."""
    centered = _center(rewards)
    largest = max((abs(value) for value in centered), default=0.0)
    if largest == 0.0:
        return centered
    scaled = [value / largest for value in centered]  # tiny or huge rewards: squares would vanish or overflow
    std = math.sqrt(math.fsum(value * value for value in scaled) / len(scaled))
    return [value / std for value in scaled]


def _check_distinct(groups: Sequence[Group | GroupRef]) -> None:
    twice = [group_id for group_id, count in Counter(group.id for group in groups).items() if count > 1]
    if twice:
        raise AdvantageError(f"Group {twice[0]!r} is in the batch more than once; siblings are grouped by group id.")


def _check_rewards(groups: Sequence[Group | GroupRef], rewards_BG: Rewards) -> None:
    for group, rewards_G in zip(groups, rewards_BG, strict=True):
        bad = [reward for reward in rewards_G if reward is not None and not math.isfinite(reward)]
        if bad:
            raise AdvantageError(
                f"Group {group.id!r} has the reward {bad[0]}; a reward is finite, or None for a failed episode."
            )


def _check_shape(rewards_BG: Rewards, advantages_BG: AdvantageRows) -> None:
    """What a user's advantage function returned fits its input."""
    got, want = [len(row) for row in advantages_BG], [len(row) for row in rewards_BG]
    if got != want:
        raise AdvantageError(
            f"The advantage function returned groups of {got} advantages for groups of {want} rewards."
        )
    for rewards_G, advantages_G in zip(rewards_BG, advantages_BG, strict=True):
        for reward, value in zip(rewards_G, advantages_G, strict=True):
            if value is not None and (reward is None or not math.isfinite(value)):
                raise AdvantageError(
                    f"The advantage function returned {value} for a reward of {reward}; it returns a finite number, "
                    "or None for an episode that is not to be trained, and always None where there is no reward."
                )
