"""Alarms sound once, name the numbers, and say what to do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from miles_core.monitor.alarms import WINDOW, Alarms

HEALTHY: Mapping[str, float] = {
    "time/step": 10.0,
    "time/take_wait": 1.0,
    "buffer/queued": 3.0,
    "buffer/running": 5.0,
    "logprob_gap/same_version_mean": 0.001,
    "reward/groups_all_low": 0.3,
    "reward/groups_all_high": 0.2,
}


class Sounded(list[tuple[str, str]]):
    def __call__(self, name: str, text: str) -> None:
        self.append((name, text))


def run(*steps: Mapping[str, float]) -> Sounded:
    sounded = Sounded()
    alarms = Alarms(on_alarm=sounded)
    for number, step in enumerate(steps, start=1):
        alarms.log(number, {**HEALTHY, **step})
    return sounded


def test_a_healthy_run_is_silent() -> None:
    assert run(*[{}] * 50) == []


@pytest.mark.parametrize(
    ("name", "step", "number", "advice"),
    [
        ("queue_empty", {"buffer/queued": 0.0, "time/take_wait": 8.0}, "80%", "add engines"),
        ("queue_full", {"buffer/running": 0.0, "buffer/queued": 8.0}, "last 8 steps", "add trainer ranks"),
        ("logprob_gap_large", {"logprob_gap/same_version_mean": 12.0}, "12 nats", "never loaded"),
        ("all_alike", {"reward/groups_all_low": 0.95}, "95%", "too hard"),
        ("all_alike", {"reward/groups_all_high": 0.9}, "90%", "mix in harder prompts"),
    ],
)
def test_a_condition_that_lasts_sounds_once_and_again_after_it_had_ended(
    name: str, step: Mapping[str, float], number: str, advice: str
) -> None:
    first = run(*[step] * (3 * WINDOW))
    assert [n for n, _ in first] == [name]
    assert number in first[0][1]
    assert advice in first[0][1]
    again = run(*[step] * WINDOW, {}, *[step] * WINDOW)
    assert [n for n, _ in again] == [name, name]


def test_a_condition_of_a_few_steps_is_no_alarm() -> None:
    assert run(*[{}, *[{"buffer/queued": 0.0, "time/take_wait": 9.0}] * (WINDOW - 1)] * 3) == []


def test_steps_in_which_no_group_finished_say_nothing_about_groups() -> None:
    nothing = {"reward/groups_all_low": float("nan"), "reward/groups_all_high": float("nan")}
    alike = {"reward/groups_all_low": 1.0}
    assert run(*[nothing] * (2 * WINDOW)) == []
    assert run(alike, *[nothing] * (WINDOW - 1)) == []
    ((name, text),) = run(*[alike, alike, alike, nothing] * 2)
    assert name == "all_alike"
    assert "100%" in text


def test_a_gap_that_rises_is_told_with_both_numbers_and_one_that_is_only_noisy_is_not() -> None:
    gaps = [0.004, 0.005, 0.004, 0.006, 0.02, 0.03, 0.05, 0.04]
    ((name, text),) = run(*({"logprob_gap/same_version_mean": gap} for gap in gaps))
    assert name == "logprob_gap_rising"
    assert "from 0.0045 to 0.035" in text
    assert run(*({"logprob_gap/same_version_mean": 0.03 * (1 + i % 2 * 0.5)} for i in range(20))) == []
    assert run(*({"logprob_gap/same_version_mean": 1e-6 * 2**i} for i in range(8))) == [], "rising, but nothing yet"


def test_a_step_that_never_ends_is_a_stall_until_one_ends() -> None:
    now = 0.0
    sounded = Sounded()
    alarms = Alarms(on_alarm=sounded, clock=lambda: now)
    now = 10_000.0
    alarms.check_stall()
    assert sounded == [], "before the first step nobody knows how long one takes"
    alarms.log(1, {"time/step": 60.0})
    now += 599.0
    alarms.check_stall()
    assert sounded == []
    now += 2.0
    alarms.check_stall()
    alarms.check_stall()
    assert [name for name, _ in sounded] == ["stall"]
    assert "10 min 1 s" in sounded[0][1]
    alarms.log(2, {"time/step": 661.0})
    now += 4000.0
    alarms.check_stall()
    assert [name for name, _ in sounded] == ["stall", "stall"]


def test_what_went_before_a_rewind_does_not_count() -> None:
    sounded = Sounded()
    alarms = Alarms(on_alarm=sounded)
    bad = {**HEALTHY, "reward/groups_all_low": 1.0}
    for number in range(WINDOW - 1):
        alarms.log(number, bad)
    alarms.rewind(3)
    alarms.log(4, bad)
    assert sounded == []
