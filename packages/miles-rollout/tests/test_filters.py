"""Dynamic filters look at the raw outcome of a finished group."""

from __future__ import annotations

import pytest
from miles_rollout import compose, no_filter, no_truncated, nonzero_spread
from miles_tito import FinishReason
from scripted_rollout import make_ref


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
