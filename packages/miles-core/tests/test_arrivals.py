"""What finished since the last step, whatever became of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from core_records import make_group
from miles_core.monitor.metrics import Arrivals, rollout_metrics
from miles_rollout.policies import MASKED_EPISODES
from miles_tito.records.summary import GroupRef, summarize


def make_ref(rewards: list[float | None]) -> GroupRef:
    return summarize(make_group("g", [[4]] * len(rewards), rewards))


def metrics(*groups: list[float | None], before: list[list[float | None]] | None = None) -> dict[str, float]:
    arrivals = Arrivals()
    if before:
        for rewards in before:
            arrivals.add(make_ref(rewards))
        arrivals.metrics()
    for rewards in groups:
        arrivals.add(make_ref(rewards))
    return arrivals.metrics()


def test_rewards_are_averaged_over_episodes_and_groups_without_spread_are_told_apart() -> None:
    found = metrics([0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [None, None])
    assert found["reward/all_mean"] == pytest.approx(3 / 8)
    assert found["reward/groups_all_low"] == 0.5
    assert found["reward/groups_all_high"] == 0.25


def test_low_and_high_are_what_the_run_has_seen_and_not_what_the_step_has() -> None:
    found = metrics([0.5, 0.5], before=[[-1.0, 2.0]])
    assert found["reward/groups_all_low"] == found["reward/groups_all_high"] == 0.0


@pytest.mark.parametrize(("reward", "low", "high"), [(0.0, 1.0, 0.0), (0.3, 1.0, 0.0), (1.0, 0.0, 1.0)])
def test_a_run_that_has_seen_one_reward_only_guesses_which_end_it_is(reward: float, low: float, high: float) -> None:
    found = metrics([reward, reward])
    assert (found["reward/groups_all_low"], found["reward/groups_all_high"]) == (low, high)


def test_a_step_without_arrivals_has_no_numbers() -> None:
    assert all(math.isnan(value) for value in metrics().values())


def test_an_episode_that_is_not_trained_makes_nothing_stale() -> None:
    ref = summarize(make_group("g", [[4], [6]], version=2))
    assert rollout_metrics([ref], version=5)["staleness/max"] == 3
    masked = replace(ref, metadata={MASKED_EPISODES: ("g/0", "g/1")})
    fresh = summarize(make_group("f", [[4], [6]], version=5))
    found = rollout_metrics([masked, fresh], version=5)
    assert (found["staleness/max"], found["staleness/mean"]) == (0, 0)
    assert found["batch/episodes"] == 4
