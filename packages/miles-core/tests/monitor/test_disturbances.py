from __future__ import annotations

import io
from pathlib import Path

import pytest
from miles_core.monitor import MonitoredRun
from miles_core.monitor.console import ConsoleMonitor, Disturbances


def test_a_quiet_step_has_no_words():
    assert Disturbances().of({"reward/mean": 0.5, "engine/restarts": 0.0, "time/checkpoint_wait": 0.01}) == []


def test_counts_that_grow_are_told_once_by_how_much():
    disturbances = Disturbances()
    assert disturbances.of({"engine/restarts": 2.0}) == ["2 engines restarted"]
    assert disturbances.of({"engine/restarts": 2.0}) == []
    assert disturbances.of({}) == []
    assert disturbances.of({"engine/restarts": 3.0, "engine/paused_seconds": 31.0}) == [
        "paused 31 s: no engine served",
        "1 engine restarted",
    ]


def test_a_count_that_begins_again_is_taken_from_zero():
    disturbances = Disturbances()
    disturbances.of({"engine/swallowed": 5.0})
    assert disturbances.of({"engine/swallowed": 1.0}) == ["1 request lost by engines"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"engine/given_up": 1.0}, "1 engine given up"),
        ({"sync/failed_engines": 1.0}, "1 engine missed the weight update"),
        ({"optimizer/skipped": 1.0}, "optimizer step skipped: its gradient was not finite"),
        ({"eval/skipped": 1.0}, "evaluation without a score"),
        ({"time/checkpoint_wait": 12.0}, "waited 12 s for the last checkpoint"),
    ],
)
def test_each_disturbance_has_its_words(metrics, words):
    assert Disturbances().of(metrics) == [words]


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_the_console_says_it_beside_the_numbers(mode):
    out = io.StringIO()
    console = ConsoleMonitor(MonitoredRun(path=Path("run"), total_steps=9, config={}), mode=mode, file=out)
    console.log(1, {"reward/mean": 0.5, "engine/restarts": 1.0})
    console.log_late(1, {"eval/skipped": 1.0})
    assert "1 engine restarted" in out.getvalue()
    assert "evaluation without a score" in out.getvalue()
    if mode == "rich":
        console._progress.stop()  # pyright: ignore
