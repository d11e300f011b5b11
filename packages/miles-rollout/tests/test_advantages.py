"""Advantages: formulas, failed episodes, uneven groups, bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_rollout import (
    ADVANTAGES,
    MASKED_EPISODES,
    AdvantageError,
    AdvantageRows,
    Rewards,
    RolloutConfigError,
    advantages_by_episode,
    assign_advantages,
    dr_grpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from miles_tito import Episode, Group, Outcome, summarize
from scripted_rollout import make_group, make_ref, trajectory

BY_GROUP = ["grpo", "dr_grpo", "rloo"]

reward = st.one_of(st.none(), st.floats(min_value=-1e12, max_value=1e12, allow_nan=False))
batches = st.lists(st.lists(reward, min_size=1, max_size=8), min_size=1, max_size=6)


def flat(rows: Rewards) -> list[float | None]:
    return [value for row in rows for value in row]


def test_grpo_divides_by_the_population_std() -> None:
    assert grpo([[0.0, 0.0, 1.0, 1.0]]) == [[-1.0, -1.0, 1.0, 1.0]]


def test_dr_grpo_only_centers() -> None:
    assert dr_grpo([[0.0, 0.0, 0.0, 1.0]]) == [[-0.25, -0.25, -0.25, 0.75]]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert flat(rloo([[3.0, 0.0, 0.0]])) == pytest.approx([3.0, -1.5, -1.5])


def test_reinforce_pp_takes_its_baseline_from_the_batch() -> None:
    assert reinforce_pp([[1.0], [0.0], [1.0], [0.0]]) == [[1.0], [-1.0], [1.0], [-1.0]]


def test_reinforce_pp_baseline_centers_by_group_and_scales_by_batch() -> None:
    scale = math.sqrt((2 * 0.25 + 2 * 25.0) / 4)
    expected = [-0.5 / scale, 0.5 / scale, -5 / scale, 5 / scale]
    assert flat(reinforce_pp_baseline([[0.0, 1.0], [0.0, 10.0]])) == pytest.approx(expected)


@pytest.mark.parametrize("name", BY_GROUP)
def test_a01_a_rejected_episode_shifts_no_baseline_and_is_not_trained(name: str) -> None:
    (with_failed,) = ADVANTAGES[name]([[None, 1.0, 0.0, 1.0]])
    (without,) = ADVANTAGES[name]([[1.0, 0.0, 1.0]])
    assert with_failed == [None, *without]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.0, *[0.95] * 7], [0.3, 0.1 + 0.2, 0.3]])
def test_a02_one_different_sibling_gives_bounded_advantages(name: str, rewards: list[float]) -> None:
    values = [value for value in flat(ADVANTAGES[name]([rewards])) if value is not None]
    assert max(map(abs, values)) <= math.sqrt(len(rewards) - 1) + 1e-9


@pytest.mark.parametrize("name", [*BY_GROUP, "reinforce_pp_baseline"])
def test_a03_uneven_groups_are_normalised_each_by_itself(name: str) -> None:
    rewards: list[list[float | None]] = [[0.0, 1.0, 5.0], [7.0], [2.0, 2.0, 2.0, 6.0]]
    rows = ADVANTAGES[name](rewards)
    assert [len(row) for row in rows] == [3, 1, 4]
    assert rows[1] == [0.0], "a group of one has nothing to compare with"
    for row in rows:
        assert math.fsum(value for value in row if value is not None) == pytest.approx(0.0, abs=1e-9)
    if name in BY_GROUP:
        assert rows == [ADVANTAGES[name]([row])[0] for row in rewards]


def test_a04_an_episode_with_two_trajectories_counts_once_in_the_mean() -> None:
    two = Episode(
        id="g/0",
        prompt_id="p",
        group_id="g",
        outcome=Outcome.GRADED,
        reward=1.0,
        trajectories=(trajectory("a"), trajectory("b")),
    )
    one = replace(two, id="g/1", reward=0.5, trajectories=(trajectory("c"),))
    samples = assign_advantages(Group(id="g", prompt_id="p", episodes=(two, one)), advantage="dr_grpo")
    assert [sample.advantage for sample in samples] == [0.25, 0.25, -0.25]
    assert [sample.loss_denominator for sample in samples] == [6, 6, 3]


def test_a05_siblings_are_grouped_by_id_whatever_the_order_of_the_groups() -> None:
    groups = [make_group("x", [0.0, 1.0]), make_group("y", [10.0, 30.0])]
    forward = advantages_by_episode(groups, advantage="dr_grpo")
    assert forward == {"x/0": -0.5, "x/1": 0.5, "y/0": -10.0, "y/1": 10.0}
    assert advantages_by_episode(groups[::-1], advantage="dr_grpo") == forward
    with pytest.raises(AdvantageError, match="'x' is in the batch more than once"):
        advantages_by_episode([groups[0], groups[0]])


def test_references_give_the_same_advantages_as_their_groups() -> None:
    groups = [make_group("x", [0.0, None, 1.0]), make_group("y", [2.0, 3.0, 3.0])]
    assert advantages_by_episode(groups) == advantages_by_episode([summarize(group) for group in groups])


def test_a_failed_episode_gives_no_sample() -> None:
    samples = assign_advantages([make_group("x", [0.0, None, 1.0])])
    assert [sample.episode_id for sample in samples] == ["x/0", "x/2"]


def test_s02_a_masked_episode_stays_in_the_baseline_and_is_not_trained() -> None:
    ref = replace(make_ref("x", [0.0, 1.0, 5.0]), metadata={MASKED_EPISODES: ("x/2",)})
    assert advantages_by_episode([ref], advantage="dr_grpo") == {"x/0": -2.0, "x/1": -1.0, "x/2": None}


@given(batches)
def test_every_advantage_is_finite_bounded_and_missing_exactly_with_its_reward(rewards: Rewards) -> None:
    present = [value for value in flat(rewards) if value is not None]
    spread = max(present, default=0.0) - min(present, default=0.0)
    for name, function in ADVANTAGES.items():
        rows = function(rewards)
        assert [[value is None for value in row] for row in rows] == [[r is None for r in row] for row in rewards]
        standardised = name in ("grpo", "reinforce_pp", "reinforce_pp_baseline")
        bound = math.sqrt(max(len(present) - 1, 0)) if standardised else spread
        assert all(abs(value) <= bound * (1 + 1e-6) for value in flat(rows) if value is not None)


@given(
    st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=8),
    st.integers(-1000, 1000),
    st.integers(1, 64),
)
def test_grpo_does_not_change_when_rewards_are_shifted_or_scaled(rewards: list[float], shift: int, scale: int) -> None:
    moved = [reward * scale + shift for reward in rewards]
    assert flat(grpo([moved])) == pytest.approx(flat(grpo([rewards])), abs=1e-6)


def test_a_reward_that_is_not_finite_is_refused_by_group() -> None:
    ref = make_ref("x", [0.0, 1.0])
    broken = replace(ref, episodes=(replace(ref.episodes[0], reward=math.nan), ref.episodes[1]))
    with pytest.raises(AdvantageError, match="Group 'x' has the reward nan"):
        advantages_by_episode([broken])


def test_your_own_function_is_called_with_the_rewards_and_checked() -> None:
    def rank(rewards_BG: Rewards) -> AdvantageRows:
        return [[None if reward is None else reward * 2 for reward in row] for row in rewards_BG]

    def short(rewards_BG: Rewards) -> AdvantageRows:
        return [list(row[:1]) for row in rewards_BG]

    def zero_for_failed(rewards_BG: Rewards) -> AdvantageRows:
        return [[0.0 for _ in row] for row in rewards_BG]

    refs = [make_ref("x", [1.0, None])]
    assert advantages_by_episode(refs, advantage=rank) == {"x/0": 2.0, "x/1": None}
    with pytest.raises(AdvantageError, match=r"groups of \[1\] advantages for groups of \[2\] rewards"):
        advantages_by_episode(refs, advantage=short)
    with pytest.raises(AdvantageError, match=r"returned 0\.0 for a reward of None"):
        advantages_by_episode(refs, advantage=zero_for_failed)


def test_an_advantage_can_be_an_import_string_and_a_wrong_name_gets_a_suggestion() -> None:
    refs = [make_ref("x", [0.0, 1.0])]
    assert advantages_by_episode(refs, advantage="miles_rollout.advantages:dr_grpo") == {"x/0": -0.5, "x/1": 0.5}
    with pytest.raises(RolloutConfigError, match=r"'gprpo'. Did you mean grpo\b.*\? Built in: dr_grpo, grpo"):
        advantages_by_episode(refs, advantage="gprpo")
    with pytest.raises(RolloutConfigError, match=r"miles_rollout\.advantages has no 'nothing'"):
        advantages_by_episode(refs, advantage="miles_rollout.advantages:nothing")
    with pytest.raises(RolloutConfigError, match="a str that cannot be called"):
        advantages_by_episode(refs, advantage="miles_rollout.advantages:__name__")
