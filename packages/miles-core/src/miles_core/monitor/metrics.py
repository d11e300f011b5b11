"""Numbers about the groups of one step, from their summaries alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from miles_rollout.fates import FateCounts
from miles_rollout.policies import MASKED_EPISODES
from miles_tito.records.summary import EpisodeSummary, GroupRef


def rollout_metrics(groups: Sequence[GroupRef], *, version: int) -> dict[str, float]:
    """Reward, length, staleness and outcome of the episodes about to be trained at `version`.

    Staleness is that of what is trained: an episode that only counts for the baseline makes nothing stale.

    Metrics that environments report are averaged over the episodes that report them, with a coverage beside
    each that not every episode reports.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    tokens = [sum(t.num_loss_tokens for t in e.trajectories) for e in episodes]
    lengths = [t.num_tokens for e in episodes for t in e.trajectories]
    masked = {name for group in groups for name in group.metadata.get(MASKED_EPISODES, ())}
    oldest = [e.oldest_version for e in episodes if e.oldest_version is not None and e.id not in masked]
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": _std(rewards),
        "reward/min": min(rewards, default=math.nan),
        "reward/max": max(rewards, default=math.nan),
        "reward/group_std": mean([_std([r for r in g.rewards if r is not None]) for g in groups]),
        "episode/tokens": mean(tokens),
        "episode/tokens_max": float(max(tokens, default=0)),
        "episode/length": mean(lengths),
        "episode/seconds": mean([e.seconds for e in episodes]),
        "episode/seconds_max": max((e.seconds for e in episodes), default=0.0),
        "episode/truncated": mean([float(any(t.finish_reason == "length" for t in e.trajectories)) for e in episodes]),
        "episode/failed": mean([float(not e.outcome.has_reward) for e in episodes]),
        "staleness/mean": mean([version - v for v in oldest]),
        "staleness/max": float(max((version - v for v in oldest), default=0)),
        "batch/episodes": float(len(episodes)),
        "batch/tokens": float(sum(lengths)),
        "batch/loss_tokens": float(sum(tokens)),
    }
    return metrics | _environment_metrics(episodes)


class Arrivals:
    """Rewards of the groups that finished since the last step, whatever their fate; the run adds each of them."""

    def __init__(self) -> None:
        self._lowest, self._highest = math.inf, -math.inf
        self._groups: list[list[float]] = []
        """Rewards of each."""

    def add(self, ref: GroupRef) -> None:
        rewards = [reward for reward in ref.rewards if reward is not None]
        self._groups.append(rewards)
        self._lowest = min([self._lowest, *rewards])
        self._highest = max([self._highest, *rewards])

    def metrics(self) -> dict[str, float]:
        """Mean reward, and the shares of groups that hold nothing but the lowest or the highest reward; starts again.

        Where every reward so far is the same, nobody knows whether it is the lowest or the highest: 1 and above is
        taken as the highest, anything below as the lowest.
        """
        groups, self._groups = [rewards for rewards in self._groups if rewards], []
        low, high = self._lowest, self._highest
        if low == high:
            low, high = (-math.inf, high) if high >= 1 else (low, math.inf)
        return {
            "reward/all_mean": mean([reward for rewards in groups for reward in rewards]),
            "reward/groups_all_low": mean([float(max(rewards) == low) for rewards in groups]),
            "reward/groups_all_high": mean([float(min(rewards) == high) for rewards in groups]),
        }


def fate_metrics(counts: FateCounts) -> dict[str, float]:
    """`fate/<fate>`: groups so far."""
    names = ("issued", "trained", "filtered", "stale", "failed", "aborted", "in_flight")
    return {f"fate/{name}": float(getattr(counts, name)) for name in names}


def _environment_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """`env/<name>` is the mean over the episodes that report `name`, `env/<name>_coverage` their share if below 1."""
    metrics: dict[str, float] = {}
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        metrics[f"env/{name}"] = mean(values)
        if len(values) < len(episodes):
            metrics[f"env/{name}_coverage"] = len(values) / len(episodes)
    return metrics


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; nan without values."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; nan without values."""
    if not values:
        return math.nan
    center = mean(values)
    return math.sqrt(mean((value - center) ** 2 for value in values))
