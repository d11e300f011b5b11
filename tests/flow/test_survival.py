"""Processes of a run are killed while it works, and it goes on; nothing is lost and nothing is used twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress

import psutil
import pytest
from fake_sglang import FakeSGLang
from miles_command import START_S, Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AWAKE = ("--env.args.quick", "1000000", "--rollout.max-empty-batches", "1000")
"""No episode naps; groups from an engine with old weights do not end the run."""


def process(command: Command, title: str) -> psutil.Process:
    """The process of the run with this title, which may lie where the mark of the run was."""
    for found in psutil.process_iter():
        with suppress(psutil.Error):
            is_below = any(command.is_driver(parent.pid) for parent in found.parents())
            if is_below and title in " ".join(found.cmdline()):
                return found
    raise AssertionError(f"no {title} runs")


def after(command: Command, steps: int) -> None:
    """Wait for more steps from now."""
    goal = command.steps + steps
    command.wait_until(lambda: command.steps >= goal)


def check(command: Command, *, steps: int) -> list[tuple[str, str, str]]:
    """The run ends as it should; returns what happened to its parts."""
    status, output = command.end(START_S)
    assert status == 0, output
    assert command.processes() == []
    fates = command.summary()["fates"]
    assert fates["trained"] == 2 * steps
    assert fates["issued"] == sum(fates[fate] for fate in ("trained", "filtered", "stale", "failed", "aborted"))
    assert (fates["in_flight"], fates["twice"]) == (0, 0)
    with closing(sqlite3.connect(command.run_dir / "ledger.db")) as db:
        return list(db.execute("SELECT kind, subject, text FROM happenings ORDER BY happening"))


def test_a_run_whose_worker_and_session_server_are_killed_goes_on(miles: Callable[..., Command]) -> None:
    command = miles(*AWAKE, "--run.steps", "30")
    command.wait_until(lambda: command.steps >= 2)
    process(command, "ray::RolloutWorker").kill()
    after(command, 3)
    process(command, "ray::SessionServer").kill()
    after(command, 3)
    happened = check(command, steps=30)
    assert ("worker", "worker-0", "gone, started again: its process died") in happened
    assert any(kind == "session server" and "its process died" in text for kind, _, text in happened)


def test_a_run_whose_only_engine_is_away_pauses_with_the_reason_and_goes_on_when_it_is_back(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    command = miles(*AWAKE, "--run.steps", "12", "--engines.rollout.health.probe-interval-s", "0.2")
    command.wait_until(lambda: command.steps >= 2)
    engine.is_starting = True
    log = command.run_dir / "log" / "driver.log"
    command.wait_until(lambda: "the run pauses: no engine is healthy" in log.read_text())
    engine.version = "default"  # as its owner's restart leaves it
    engine.is_starting = False
    happened = check(command, steps=12)
    states = [text.partition(":")[0] for kind, _, text in happened if kind == "engine"]
    back = ["starting → healthy", "healthy → dead", "dead → restarting", "restarting → syncing", "syncing → healthy"]
    assert [state for state in states if "suspect" not in state][:5] == back
    pause, end = [text for kind, subject, text in happened if (kind, subject) == ("run", "pause")]
    assert pause.startswith(f"no engine is healthy; the last was {engine.url}: ")
    assert end == "over"
