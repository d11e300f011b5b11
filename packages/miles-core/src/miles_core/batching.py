"""From the groups that a step takes to what each trainer rank does: summaries in, row indices out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_rollout.advantages import Advantages
from miles_tito.summary import GroupRef
from miles_train.batch import BatchTotals
from miles_train.packing import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory to train on: where it lies, and its scalar advantage."""

    group: int
    """Index into `RankWork.handles`."""
    episode: int
    trajectory: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank needs for one step: handles of the groups it reads, its rows by micro-batch, global totals."""

    handles: tuple[Any, ...]
    micro_batches: tuple[tuple[Row, ...], ...]
    totals: BatchTotals


def plan_batch(
    groups: Sequence[GroupRef],
    *,
    advantages: Advantages,
    token_budget: int,
    ranks: int,
    pack_rows: Callable[..., tuple[tuple[tuple[int, ...], ...], ...]] = pack,
) -> list[RankWork]:
    """Turn raw rewards into advantages and spread the rows over `ranks`.

    An episode without advantage (it has no reward) is not trained and not counted in the totals.
    """
    rows: list[Row] = []
    lengths: list[int] = []
    num_episodes = num_loss_tokens = 0
    for g, (group, advantages_E) in enumerate(
        zip(groups, advantages([group.rewards for group in groups]), strict=True)
    ):
        for e, (episode, advantage) in enumerate(zip(group.episodes, advantages_E, strict=True)):
            if advantage is None or episode.num_loss_tokens == 0:
                continue
            num_episodes += 1
            num_loss_tokens += episode.num_loss_tokens
            for t, trajectory in enumerate(episode.trajectories):
                if trajectory.num_loss_tokens:
                    rows.append(Row(group=g, episode=e, trajectory=t, advantage=advantage))
                    lengths.append(trajectory.num_tokens)
    totals = BatchTotals(num_episodes=num_episodes, num_loss_tokens=num_loss_tokens)
    layout = pack_rows(lengths, token_budget=token_budget, ranks=ranks)
    return [_rank_work(groups, rows, micro_batches, totals) for micro_batches in layout]


def _rank_work(
    groups: Sequence[GroupRef],
    rows: Sequence[Row],
    micro_batches: Sequence[Sequence[int]],
    totals: BatchTotals,
) -> RankWork:
    used = sorted({rows[i].group for micro_batch in micro_batches for i in micro_batch})
    position = {group: i for i, group in enumerate(used)}
    return RankWork(
        handles=tuple(groups[g].handle for g in used),
        micro_batches=tuple(
            tuple(
                Row(
                    group=position[rows[i].group],
                    episode=rows[i].episode,
                    trajectory=rows[i].trajectory,
                    advantage=rows[i].advantage,
                )
                for i in micro_batch
            )
            for micro_batch in micro_batches
        ),
        totals=totals,
    )
