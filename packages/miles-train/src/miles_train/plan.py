"""From lengths to work: which rows each rank trains in which optimizer step.

The driver plans with counts alone; ranks fetch the rows they were given and make batches of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from miles_tito.records import Sample

from .batch import Batch, BatchTotals, make_batch
from .errors import BatchError
from .packing import Rows, pack

if TYPE_CHECKING:
    from .config import TrainConfig
    from .trainer import Layout


class Row(NamedTuple):
    """What the planner knows of one sample: counts, so that no tokens travel to it."""

    episode_id: str
    num_tokens: int
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows of each rank in one optimizer step: `plan_batch` makes it, and each rank a `Batch` of its own rows."""

    ranks: tuple[tuple[Rows, ...], ...]
    """`[data ranks][micro-batches]` row indices."""
    totals: BatchTotals


def plan_batch(
    rows: Sequence[Row], *, token_budget: int, ranks: int, minibatches: int = 1, multiple_of: int = 1
) -> tuple[StepPlan, ...]:
    """Split rows into optimizer steps, ranks and micro-batches.

    Rows without loss tokens are left out: they cannot change a weight. All rows of an episode stay in one step.

    Args:
        ranks: `Layout.data_ranks`: those that train different rows.
        multiple_of: `Layout.micro_batch_multiple`.

    Returns:
        One plan an optimizer step: `minibatches` of them, fewer only where there are fewer episodes.
    """
    trained = [index for index, row in enumerate(rows) if row.num_loss_tokens > 0]
    if not trained:
        raise BatchError(
            f"None of the {len(rows)} rows has a loss token, so there is nothing to train. Filter such groups out."
        )
    return tuple(
        _step(part, rows, token_budget=token_budget, ranks=ranks, multiple_of=multiple_of)
        for part in _by_episode(trained, rows, minibatches=minibatches)
    )


def batches_of(
    samples: Sequence[Sample], config: TrainConfig, *, rank: int = 0, layout: Layout | None = None
) -> list[Batch]:
    """Plan and make this rank's batches of samples that lie in this process, one an optimizer step.

    Args:
        layout: what `setup` returned on this rank, in place of `rank`: needed where ranks share rows.
    """
    rows = [Row(s.episode_id, len(s.tokens), int(s.loss_mask.sum())) for s in samples]
    data_rank, data_ranks = (layout.data_rank, layout.data_ranks) if layout else (rank, config.ranks)
    plan = plan_batch(
        rows,
        token_budget=config.token_budget,
        ranks=data_ranks,
        minibatches=config.minibatches,
        multiple_of=layout.micro_batch_multiple if layout else 1,
    )
    return [
        make_batch(
            [[samples[index] for index in micro_batch] for micro_batch in step.ranks[data_rank]],
            step.totals,
            normalization=config.loss.normalization,
            max_tokens=config.loss.max_tokens,
        )
        for step in plan
    ]


def _by_episode(trained: Sequence[int], rows: Sequence[Row], *, minibatches: int) -> list[list[int]]:
    """Whole episodes into steps of like size, longest first."""
    if minibatches == 1:
        return [list(trained)]
    episodes: dict[str, list[int]] = {}
    for index in trained:
        episodes.setdefault(rows[index].episode_id, []).append(index)
    size = {key: sum(rows[index].num_tokens for index in members) for key, members in episodes.items()}
    parts: list[list[int]] = [[] for _ in range(min(minibatches, len(episodes)))]
    tokens = [0] * len(parts)
    for key in sorted(episodes, key=lambda key: -size[key]):  # stable: ties keep the order given
        lightest = tokens.index(min(tokens))
        parts[lightest].extend(episodes[key])
        tokens[lightest] += size[key]
    return [sorted(part) for part in parts]


def _step(part: Sequence[int], rows: Sequence[Row], *, token_budget: int, ranks: int, multiple_of: int) -> StepPlan:
    lengths = [rows[index].num_tokens for index in part]
    assignment = pack(lengths, token_budget=token_budget, ranks=ranks, multiple_of=multiple_of)
    totals = BatchTotals(
        num_episodes=len({rows[index].episode_id for index in part}),
        num_loss_tokens=sum(rows[index].num_loss_tokens for index in part),
    )
    return StepPlan(
        ranks=tuple(
            tuple(tuple(part[place] for place in micro_batch) for micro_batch in micro_batches)
            for micro_batches in assignment
        ),
        totals=totals,
    )
