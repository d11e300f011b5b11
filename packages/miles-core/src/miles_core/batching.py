"""From the groups that a step takes to what each trainer rank does, and what it reports.

Summaries go in, row indices come out: `TrainerRanks` plans on the driver, `TrainerRank` reads the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_tito.records.summary import GroupRef
from miles_train.batch import BatchTotals
from miles_train.plan import Row, StepPlan, plan_batch

AdvantagesByEpisode = Callable[[Sequence[GroupRef]], Mapping[str, float | None]]
"""Advantage of each episode of a batch by id; None for an episode that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAddress:
    """One trajectory to train on: where it lies, and its advantage."""

    group: int
    """Index into `RankWork.handles`."""
    episode: int
    trajectory: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One rank's rows of one optimizer step."""

    micro_batches: tuple[tuple[RowAddress, ...], ...]
    """As many as on every other rank."""
    totals: BatchTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank needs to train one batch."""

    handles: tuple[Any, ...]
    """Handles of the groups that this rank reads, no others."""
    steps: tuple[OptimizerStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the trainer ranks report after one batch."""

    version: int
    metrics: dict[str, float]


def plan_ranks(
    groups: Sequence[GroupRef],
    *,
    advantages: AdvantagesByEpisode,
    token_budget: int,
    ranks: int,
    minibatches: int,
    multiple_of: int = 1,
) -> list[RankWork]:
    """Turn raw rewards into advantages, and spread the trajectories over optimizer steps, ranks and micro-batches.

    An episode without advantage is not trained and not counted in the totals.

    Args:
        ranks: `Layout.data_ranks` of the trainer.
        multiple_of: its `Layout.micro_batch_multiple`.

    Returns:
        [data ranks] what every rank of that data rank trains.
    """
    by_episode = advantages(groups)
    rows: list[Row] = []
    addresses: list[RowAddress] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            advantage = by_episode[episode.id]
            if advantage is None:
                continue
            for t, trajectory in enumerate(episode.trajectories):
                rows.append(Row(episode.id, trajectory.num_tokens, trajectory.num_loss_tokens))
                addresses.append(RowAddress(group=g, episode=e, trajectory=t, advantage=advantage))
    plans = plan_batch(rows, token_budget=token_budget, ranks=ranks, minibatches=minibatches, multiple_of=multiple_of)
    return [_rank_work(rank, plans, groups, addresses) for rank in range(ranks)]


def _rank_work(
    rank: int, plans: Sequence[StepPlan], groups: Sequence[GroupRef], addresses: Sequence[RowAddress]
) -> RankWork:
    used = sorted({addresses[i].group for plan in plans for micro_batch in plan.ranks[rank] for i in micro_batch})
    position = {group: i for i, group in enumerate(used)}

    def local(address: RowAddress) -> RowAddress:
        return RowAddress(
            group=position[address.group],
            episode=address.episode,
            trajectory=address.trajectory,
            advantage=address.advantage,
        )

    return RankWork(
        handles=tuple(groups[g].handle for g in used),
        steps=tuple(
            OptimizerStep(
                micro_batches=tuple(tuple(local(addresses[i]) for i in rows) for rows in plan.ranks[rank]),
                totals=plan.totals,
            )
            for plan in plans
        ),
    )
