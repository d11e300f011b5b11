"""The schedule against its bounds, in simulated time: what `benchmarks/loop.py` measures, without the machine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "loop.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("loop_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_steps_longer_than_the_longest_episode_come_near_the_bound_and_lose_nothing(benchmark: Any) -> None:
    rows = benchmark.measure(benchmark.Load(steps=10), in_simulated_time=True)
    assert [row.max_staleness for row in rows] == [0, 1, 1, 2, 2]
    for row in rows:
        assert row.achieved >= 0.95, row
        assert row.staleness_max <= row.max_staleness
        assert row.discarded == 0
        assert "0 lost, 0 twice" in row.fates
    assert all(row.samples_per_s > 1.5 * rows[0].samples_per_s for row in rows[1:])


def test_long_episodes_cost_speed_if_batches_wait_for_them_and_bias_if_they_do_not(benchmark: Any) -> None:
    load = benchmark.Load(groups_per_step=16, slots=64, steps=16)
    synchronous, overtake, wait, _, _ = benchmark.measure(load, in_simulated_time=True)
    assert wait.achieved >= 0.95
    assert wait.limited_by == "age"
    assert (wait.discarded, wait.long_trained) == (0, pytest.approx(1, abs=0.1))
    assert overtake.discarded > 0.1
    assert overtake.long_trained < 0.5
    assert overtake.samples_per_s > wait.samples_per_s > 1.5 * synchronous.samples_per_s
