"""Evaluation beside training on real engines: of its own, and by the user's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from miles_core.durable.ledger import LEDGER, query
from miles_core.durable.spool import read_groups

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = (
    *("quickstart", "--run.steps", "4", "--run.dir", "runs", "--sft.steps", "12", "--sft.schedule.kind", "constant"),
    *("--rollout.groups-per-step", "6", "--eval.every", "2"),
)
POINTS = "SELECT version, score IS NOT NULL, reason FROM evaluations ORDER BY version"


def test_engines_of_the_evaluations_own_score_snapshots_while_training_goes_on(miles: Callable[..., Any]):
    run = miles(
        *SMALL,
        *("--run.name", "dedicated", "--eval.mode", "dedicated", "--eval.num-prompts", "12"),
        *("--engines.judge.role", "eval", "--engines.judge.context-length", "256", "--engines.judge.threads", "1"),
        name="dedicated",
    )
    assert run.status == 0, run.output
    assert query(run.path / LEDGER, POINTS)[1] == [(0, 1, ""), (2, 1, ""), (4, 1, "")]
    scores = {row["step"]: row["eval/score"] for row in run.rows if "eval/score" in row}
    assert sorted(scores) == [0, 2, 4]
    assert (run.summary["eval_before"], run.summary["eval_after"]) == (scores[0], scores[4])
    kept = {
        folder.name: sum(1 for file in folder.glob("*.spool") for _ in read_groups(file))
        for folder in (run.path / "eval").glob("step-*")
    }
    assert kept == {"step-000002": 12, "step-000004": 12}
    versions = {
        trajectory.oldest_version
        for file in (run.path / "eval" / "step-000002").glob("*.spool")
        for group in read_groups(file)
        for episode in group.episodes
        for trajectory in episode.trajectories
    }
    assert versions == {2}
    assert not list((run.path / "eval" / "snapshots").iterdir())
    assert not list((run.path / "trajectories").glob("eval-*")), "nothing of it looks like training data"
    assert not run.survivors


def test_a_function_of_the_users_own_scores_checkpoints(miles: Callable[..., Any], tmp_path: Path):
    (tmp_path / "my_evals.py").write_text(
        "import json\n"
        "def count(checkpoint, step):\n"
        "    config = json.loads((checkpoint / 'config.json').read_text())\n"
        "    if step == 2:\n"
        "        raise RuntimeError('no such benchmark')\n"
        "    return {'score': step / 10, 'layers': config['num_hidden_layers']}\n"
    )
    run = miles(
        *SMALL,
        *("--run.name", "external", "--eval.mode", "external", "--eval.external", "my_evals:count"),
        *("--eval.num-prompts", '"none"'),
        name="external",
    )
    assert run.status == 0, run.output
    assert query(run.path / LEDGER, POINTS)[1] == [
        (0, 1, ""),
        (2, 0, "evaluating: ExternalEvalError: exit status 1: RuntimeError: no such benchmark"),
        (4, 1, ""),
    ]
    rows = {row["step"]: row for row in run.rows if "eval/seconds" in row}
    assert (rows[0]["eval/score"], rows[4]["eval/score"]) == (0.0, 0.4)
    assert rows[2]["eval/skipped"] == 1
    assert "eval/score" not in rows[2]
    assert not run.survivors
