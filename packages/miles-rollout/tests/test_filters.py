"""Dynamic filters look at the raw outcome of a finished group."""

from __future__ import annotations

import pytest
from miles_rollout import compose, no_filter, no_truncated, nonzero_spread
from miles_tito import FinishReason
from scripted_rollout import make_fan_out_ref, make_ref


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 0.0, 0.0], "zero_spread"),
        ([1.0, 1.0, None], "zero_spread"),
        ([1.0, None, None], "zero_spread"),
        ([0.3, 0.1 + 0.2], "zero_spread"),
        ([1e-7, 2e-7], None),
        ([-1.0, 1.0], None),
        ([0.0, None, 0.5], None),
    ],
)
def test_only_a_group_whose_rewards_differ_passes(rewards: list[float | None], reason: str | None) -> None:
    assert nonzero_spread(make_ref("g", rewards)) == reason


def test_truncated_groups_can_be_left_out() -> None:
    assert no_truncated(make_ref("g", [0.0, 1.0], finish=FinishReason.LENGTH)) == "truncated"
    assert no_truncated(make_ref("g", [0.0, 1.0])) is None


def test_composed_filters_give_the_first_reason() -> None:
    both = compose(no_filter, no_truncated, nonzero_spread)
    assert both(make_ref("g", [1.0, 1.0], finish=FinishReason.LENGTH)) == "truncated"
    assert both(make_ref("g", [1.0, 1.0])) == "zero_spread"
    assert both(make_ref("g", [0.0, 1.0])) is None


def test_s04_filters_judge_episodes_however_many_trajectories_they_made() -> None:
    fanned = make_fan_out_ref("g", {0.0: [0, 0, 0], 1.0: [0]})
    assert (nonzero_spread(fanned), no_truncated(fanned), no_filter(fanned)) == (None, None, None)
    assert nonzero_spread(make_fan_out_ref("g", {1.0: [0, 0]}, failed=1)) == "zero_spread"
    assert no_truncated(make_fan_out_ref("g", {0.0: [0, 0], 1.0: [0]}, finish=FinishReason.LENGTH)) == "truncated"
