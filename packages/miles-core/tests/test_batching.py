"""From summaries to the work of each rank: every trained trajectory once, nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from core_records import make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_core.batching import RankWork, plan_ranks
from miles_tito.records import Group
from miles_tito.records.summary import GroupRef, summarize
from miles_train.errors import BatchError, PackingError

BUDGET = 24

trajectories = st.lists(st.integers(1, BUDGET), max_size=3)
"""Lengths of an episode's trajectories; 1 and 2 are prompts without a sampled token."""
rewards = st.sampled_from([0.0, 0.5, 1.0, None])
episodes = st.lists(st.tuples(trajectories, rewards), min_size=1, max_size=4)
batches = st.lists(episodes, min_size=1, max_size=5).map(
    lambda groups: [
        make_group(f"g{g}", [[] if r is None else t for t, r in group], [r for _, r in group])
        for g, group in enumerate(groups)
    ]
)


def reward_as_advantage(groups: Sequence[GroupRef]) -> Mapping[str, float | None]:
    """Half an episode's reward; none for the middle ones, as a filter on single episodes would do."""
    return {
        e.id: None if e.reward is None or e.reward == 0.5 else e.reward / 2 for group in groups for e in group.episodes
    }


def plan(groups: Sequence[Group], *, ranks: int, minibatches: int = 1) -> list[RankWork]:
    return plan_ranks(
        [summarize(group, handle=group.id) for group in groups],
        advantages=reward_as_advantage,
        token_budget=BUDGET,
        ranks=ranks,
        minibatches=minibatches,
    )


def trained(groups: Sequence[Group]) -> dict[str, tuple[str, float, int]]:
    """Id of each trajectory to train: its episode, its advantage, its loss tokens."""
    return {
        t.id: (e.id, e.reward / 2, t.num_loss_tokens)
        for group in groups
        for e in group.episodes
        if e.reward is not None and e.reward != 0.5
        for t in e.trajectories
        if t.num_loss_tokens
    }


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 3))
def test_every_trained_trajectory_is_in_one_place_with_its_advantage(
    groups: list[Group], ranks: int, minibatches: int
) -> None:
    wanted = trained(groups)
    if not wanted:
        with pytest.raises(BatchError, match="nothing to train"):
            plan(groups, ranks=ranks, minibatches=minibatches)
        return
    work = plan(groups, ranks=ranks, minibatches=minibatches)
    by_id = {group.id: group for group in groups}
    places: Counter[str] = Counter()
    for rank in work:
        for row in (row for step in rank.steps for rows in step.micro_batches for row in rows):
            episode = by_id[rank.handles[row.group]].episodes[row.episode]
            trajectory = episode.trajectories[row.trajectory]
            places[trajectory.id] += 1
            assert row.advantage == wanted[trajectory.id][1]
    assert places == dict.fromkeys(wanted, 1)


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 3))
def test_ranks_meet_in_as_many_micro_batches_and_agree_on_the_totals(
    groups: list[Group], ranks: int, minibatches: int
) -> None:
    wanted = trained(groups)
    if not wanted:
        return
    work = plan(groups, ranks=ranks, minibatches=minibatches)
    shapes = {tuple((len(step.micro_batches), step.totals) for step in rank.steps) for rank in work}
    assert len(shapes) == 1, "a rank would wait for the others for ever, or weigh its tokens differently"
    totals = [step.totals for step in work[0].steps]
    assert sum(total.num_episodes for total in totals) == len({episode for episode, _, _ in wanted.values()})
    assert sum(total.num_loss_tokens for total in totals) == sum(tokens for _, _, tokens in wanted.values())
    assert len(totals) == min(minibatches, len({episode for episode, _, _ in wanted.values()}))


@settings(max_examples=150, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 3))
def test_a_rank_fetches_only_groups_that_it_trains_each_once(groups: list[Group], ranks: int, minibatches: int) -> None:
    if not trained(groups):
        return
    for rank in plan(groups, ranks=ranks, minibatches=minibatches):
        used = {row.group for step in rank.steps for rows in step.micro_batches for row in rows}
        assert used == set(range(len(rank.handles)))
        assert len(set(rank.handles)) == len(rank.handles)


def test_an_episode_without_advantage_is_in_no_total() -> None:
    group = make_group("g", [[6], [6], []], [1.0, 0.5, None])
    (rank,) = plan([group], ranks=1)
    (step,) = rank.steps
    assert (step.totals.num_episodes, step.totals.num_loss_tokens) == (1, 4)


def test_an_episode_counts_once_however_many_trajectories_it_has() -> None:
    group = make_group("g", [[6, 5, 4], [6]], [1.0, 0.0])
    (rank,) = plan([group], ranks=1)
    assert rank.steps[0].totals.num_episodes == 2
    assert rank.steps[0].totals.num_loss_tokens == 4 + 3 + 2 + 4


def test_a_trajectory_above_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(PackingError, match=rf"token budget of {BUDGET}.*has {BUDGET + 3} tokens"):
        plan([make_group("g", [[BUDGET + 3], [4]], [1.0, 0.0])], ranks=1)
