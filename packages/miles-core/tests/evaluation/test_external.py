"""Evaluation by the user's own code: a function, a command, and everything that they can do wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
from miles_core.evaluation.external import ExternalEvalError, ExternalScorer, command, read_metrics

FUNCTIONS = """
def score(checkpoint, step):
    print("loading", checkpoint)
    return {"score": float((checkpoint / "weights").read_text()), "gsm8k/score": step / 10}

def broken(checkpoint, step):
    raise RuntimeError("no such benchmark")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Evaluates a snapshot that holds 0.25 with the given target."""
    (tmp_path / "user_evals.py").write_text(FUNCTIONS)
    (tmp_path / "weights").write_text("0.25")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def run(target, *, timeout_s=60.0):
        scorer = ExternalScorer(target, log=lambda step: tmp_path / f"eval-{step}.log")
        async with asyncio.timeout(timeout_s):
            (score,) = await scorer(7, tmp_path)
        return score

    return run


async def test_a_function_gets_the_checkpoint_and_the_step(run, tmp_path):
    score = await run("user_evals:score")
    assert (score.dataset, score.score, score.reason) == ("external", 0.25, "")
    assert score.metrics == {"eval/score": 0.25, "eval/gsm8k/score": 0.7}
    assert f"loading {tmp_path}" in (tmp_path / "eval-7.log").read_text()


async def test_a_command_says_its_metrics_in_its_last_json_line(run, tmp_path):
    script = "import sys, json; print('{oops'); print(json.dumps({'loss': float(sys.argv[2])})); print('bye')"
    score = await run(f'{sys.executable} -c "{script}" {{checkpoint}} {{step}}')
    assert score.metrics == {"eval/loss": 7.0}
    assert (score.score, score.reason) == (None, "its metrics hold no `score`")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("user_evals:broken", "exit status 1: RuntimeError: no such benchmark"),
        ("user_evals:scroe", "Did you mean score"),
        ("no-such-program {checkpoint}", "exit status 127: cannot start no-such-program"),
        (f"{sys.executable} -c pass {{checkpoint}}", "no line of its output is a JSON object; the last is ''"),
    ],
)
async def test_a_failure_says_how_it_ended(run, target, reason):
    with pytest.raises(ExternalEvalError, match=reason):
        await run(target)


async def test_a_timeout_kills_it_with_all_that_it_started(run, tmp_path):
    script = (
        "import subprocess, sys, time, pathlib; p = subprocess.Popen(['sleep', '600']); "
        "pathlib.Path(sys.argv[1], 'pid').write_text(str(p.pid)); time.sleep(600)"
    )
    evaluation = asyncio.create_task(run(f'{sys.executable} -c "{script}" {{checkpoint}}'))
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ('{"score": NaN}', "`score` is nan; a metric is a finite number"),
        ('{"score": true}', "`score` is True"),
        ('{"score": "0.5"}', "`score` is '0.5'"),
        ("[0.5]", "no line of its output is a JSON object"),
    ],
)
def test_only_finite_numbers_are_metrics(output, reason):
    with pytest.raises(ExternalEvalError, match=reason):
        read_metrics(output, status=0)


def test_placeholders_may_stand_inside_a_word_and_a_path_with_spaces_stays_one(tmp_path):
    words = command("evaluate --model={checkpoint} --name 'step {step}'", tmp_path / "my runs", 3)
    assert words == ["evaluate", f"--model={tmp_path}/my runs", "--name", "step 3"]
