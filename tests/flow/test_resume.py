"""`miles resume` after everything that can end a run: nothing lost, nothing twice, one row a step.

The command runs as a shell would start it, with Ray, sessions, a trainer and a worker; the engine is a scripted server
in this process, attached by its URL.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from miles_command import START_S, Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AWAKE = ("--env.args", "{ quick = 1000000 }", "--accept-changes")
"""The environment of the first part falls asleep so that groups are open when it ends."""
FATES = ("trained", "filtered", "stale", "failed", "aborted")


def ask(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.db'}?mode=ro", uri=True)) as db:
        return db.execute(sql).fetchall()


def check_finished(command: Command, *, steps: int) -> None:
    """The run reached its last step, and its books are right, seen with nothing but SQL and JSON."""
    summary = command.summary()
    assert (summary["status"], summary["steps"]) == ("finished", steps)
    rows = [json.loads(line) for line in (command.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/total" in row] == list(range(1, steps + 1)), "one row a step"
    fates = summary["fates"]
    assert fates["issued"] == sum(fates[fate] for fate in FATES)
    assert (fates["in_flight"], fates["twice"]) == (0, 0)
    assert fates["trained"] == 2 * steps
    live = ask(
        command.run_dir, "SELECT version, count(*) FROM steps JOIN step_groups USING (step) WHERE is_live GROUP BY 1"
    )
    assert live == [(step, 2) for step in range(1, steps + 1)]
    prompts = ask(command.run_dir, "SELECT prompt_id FROM groups WHERE retry_of IS NULL ORDER BY number")
    first_epoch = [prompt for (prompt,) in prompts[:50]]
    assert len(set(first_epoch)) == len(first_epoch), "no prompt comes twice within an epoch"
    assert (command.run_dir / "checkpoints" / "final" / "config.json").exists()


def open_ids(run_dir: Path) -> list[str]:
    return [i for (i,) in ask(run_dir, "SELECT group_id FROM groups WHERE fate IN ('in_flight', 'buffered')")]


def test_a_run_that_was_interrupted_goes_on_with_its_open_groups(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    first = miles("--checkpoint.every", "1")
    first.wait_until(lambda: first.steps >= 3)
    status, output = first.interrupt()
    assert status == 130, output
    assert "miles resume" in output
    waiting = open_ids(first.run_dir)
    assert len(waiting) >= 2

    refused = miles("resume", str(first.run_dir), *AWAKE[:2])
    status, output = refused.end(START_S)
    assert status == 1
    assert "env.args" in output
    assert "--accept-changes" in output

    second = miles("resume", str(first.run_dir), *AWAKE)
    status, output = second.end(START_S)
    assert status == 0, output
    check_finished(second, steps=9)
    (back,) = ask(
        second.run_dir, f"SELECT count(*) FROM groups WHERE group_id IN {tuple(waiting)} AND fate = 'trained'"
    )
    assert back[0] >= 2, "what was open came first"

    again = miles("resume", str(first.run_dir), "--accept-changes")
    status, output = again.end(START_S)
    assert status == 1
    assert "step 9" in output
    assert "--more" in output
    third = miles("resume", str(first.run_dir), "--more", "2")
    status, output = third.end(START_S)
    assert status == 0, output
    check_finished(third, steps=11)


@pytest.mark.parametrize(("every", "killed"), [(1, "all"), (4, "driver")])
def test_a_run_that_was_killed_loses_the_steps_behind_its_last_commit_and_nothing_else(
    miles: Callable[..., Command], engine: FakeSGLang, every: int, killed: str
) -> None:
    first = miles("--checkpoint.every", str(every))
    first.wait_until(lambda: first.steps >= 3)
    first.kill() if killed == "all" else first.kill_driver()
    committed = [step for (step,) in ask(first.run_dir, "SELECT version FROM steps WHERE committed_at IS NOT NULL")]
    trained = ask(first.run_dir, "SELECT count(*) FROM groups WHERE fate = 'trained'")[0][0]
    second = miles("resume", str(first.run_dir), *AWAKE)
    status, output = second.end(START_S)
    assert status == 0, output
    check_finished(second, steps=9)
    first_start, (step, returned) = ask(second.run_dir, "SELECT from_step, returned FROM starts ORDER BY start")
    assert first_start == (None, 0)
    assert step >= max(committed, default=0)
    assert returned == trained - 2 * step


def test_a_run_that_somebody_runs_is_refused(miles: Callable[..., Command]) -> None:
    first = miles()
    first.wait_until(lambda: first.steps >= 1)
    status, output = miles("resume", str(first.run_dir)).end(START_S)
    assert status == 1
    assert "process" in output
    first.interrupt()


def test_what_is_no_run_is_told(miles: Callable[..., Command], tmp_path: Path) -> None:
    status, output = miles("resume", str(tmp_path / "nothing")).end(START_S)
    assert status == 1
    assert "nothing" in output
    assert "Traceback" not in output
