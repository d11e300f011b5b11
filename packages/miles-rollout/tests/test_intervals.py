"""Intervals against other ways to compute them: tables, bootstrap, and repeated draws whose truth is known."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_rollout.intervals import mean_interval, share_interval, standard_error, student_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234)],
)
def test_quantiles_of_student_agree_with_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=2e-3)
    assert student_quantile(0.5, degrees) == pytest.approx(0.0, abs=1e-12)


def test_the_standard_error_is_that_of_a_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(0)
    values = rng.beta(0.6, 0.9, size=200)
    drawn = rng.choice(values, size=(4000, 200)).mean(axis=1)
    assert standard_error(list(values)) == pytest.approx(drawn.std(), rel=0.05)
    assert standard_error(list(values)) == pytest.approx(statistics.stdev(values) / math.sqrt(200))


def test_intervals_of_many_prompts_are_those_of_a_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(1)
    values = rng.binomial(4, rng.beta(1, 2, size=300)) / 4
    low, high = np.quantile(rng.choice(values, size=(6000, 300)).mean(axis=1), [0.025, 0.975])
    for interval in (mean_interval(list(values)), share_interval(list(values))):
        assert interval is not None
        assert interval.low == pytest.approx(low, abs=0.004)
        assert interval.high == pytest.approx(high, abs=0.004)


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize(("right", "wrong"), [(0.5, 0.5), (0.3, 3.0), (8.0, 0.4)])
def test_the_interval_of_a_share_covers_the_truth_as_often_as_it_says(samples: int, right: float, wrong: float) -> None:
    """Prompts of different difficulty, a few samples each: the truth is the mean difficulty."""
    rng = np.random.default_rng(samples)
    truth = right / (right + wrong)
    tries = 600
    covered = 0
    for _ in range(tries):
        values = rng.binomial(samples, rng.beta(right, wrong, size=40)) / samples
        interval = share_interval(list(values))
        assert interval is not None
        covered += interval.low <= truth <= interval.high
    assert covered / tries >= 0.92


def test_a_perfect_score_is_not_certain() -> None:
    interval = share_interval([1.0] * 50)
    assert interval is not None
    assert interval.high == 1.0
    assert interval.low == pytest.approx(0.9287, abs=1e-4), "Wilson's interval of 50 in 50"


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_an_interval_of_a_share_lies_in_the_unit_interval_around_its_mean(values: list[float]) -> None:
    interval = share_interval(values)
    assert interval is not None
    assert 0.0 <= interval.low <= math.fsum(values) / len(values) + 1e-12
    assert math.fsum(values) / len(values) - 1e-12 <= interval.high <= 1.0


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_one_sample_a_prompt_is_about_wilsons_textbook_interval(passed: list[bool]) -> None:
    n, p, z = len(passed), sum(passed) / len(passed), 1.959964
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    interval = share_interval([float(x) for x in passed])
    assert interval is not None
    assert interval.low <= middle - reach + 1e-6, "never narrower: t instead of z"
    assert interval.high >= middle + reach - 1e-6


def test_nothing_is_said_about_one_prompt() -> None:
    assert mean_interval([0.5]) is None
    assert share_interval([0.5]) is None
    assert standard_error([]) is None
