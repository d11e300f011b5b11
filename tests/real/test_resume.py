"""`kill -9` of a trainer rank and of the driver, with every real part; what is left goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from running import QUICK, Run

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 14


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def run(*words: str) -> Run:
        started.append(Run(tmp_path, *words))
        return started[-1]

    yield run
    for run_ in started:
        run_.kill()


def test_a_run_goes_on_from_its_last_commit_when_a_trainer_rank_dies_and_when_everything_does(
    start: Callable[..., Run],
):
    first = start(*QUICK, "--run.steps", str(STEPS), "--checkpoint.every", "2")
    first.wait_until("three steps", lambda: first.steps >= 3)
    first.named("ray::TrainerRank").kill()
    first.wait_until("new trainer ranks", lambda: first.says("The trainer goes on from the last commit"))
    first.wait_until("steps of theirs", lambda: first.steps >= 7)
    engines_started = first.log.count("starting → healthy")
    first.kill_driver()
    assert engines_started == 1, "the engine stayed when the trainer went"
    second = start("resume", str(first.path))
    assert second.finish() == 0, second.output
    assert "0 lost, 0 twice" in second.output
    rows = [json.loads(line) for line in (second.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/total" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    # The weights that were loaded are those that were saved: an engine that holds them agrees to the last digits.
    assert all((row.get("logprob_gap/same_version_max") or 0.0) <= 1e-4 for row in steps)
    assert all(row["staleness/max"] <= 1 for row in steps)
    with closing(sqlite3.connect(second.path / "ledger.db")) as db:
        starts = db.execute("SELECT from_step, is_in_place FROM starts ORDER BY start").fetchall()
        trained = db.execute("SELECT count(*), count(DISTINCT number) FROM step_groups WHERE is_live").fetchone()
    assert [in_place for _, in_place in starts] == [0, 1, 0]
    assert starts[1][0] >= 2
    assert starts[2][0] >= 6
    assert trained == (STEPS * 6, STEPS * 6)
    assert second.processes() == []
