"""The whole loop with every real part: Ray, SGLang on the CPU, session servers, FSDP2 ranks, weight pushes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]

DOCS = Path(__file__).parents[2] / "docs"


def test_two_engines_and_two_trainer_ranks_train_asynchronously_on_the_very_tokens_that_were_sampled(
    miles: Callable[..., Any],
):
    run = miles(
        *("quickstart", "--run.name", "real", "--run.steps", "4", "--run.dir", "runs"),
        *("--sft.steps", "12", "--sft.schedule.kind", "constant", "--eval.num-prompts", "8"),
        *("--engines.rollout.count", "2", "--train.ranks", "2", "--rollout.groups-per-step", "6"),
        name="real",
    )
    assert run.status == 0
    steps = [row for row in run.rows if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["staleness/max"] <= 1 for row in steps)
    assert max(row["staleness/max"] for row in steps) == 1, "nothing was generated while the trainer trained"
    # Tokens sampled under the very weights that score them: float32 on both sides, nothing re-encoded.
    assert steps[0]["logprob_gap/max"] <= 1e-4
    assert all((row.get("logprob_gap/same_version_max") or 0.0) <= 1e-4 for row in steps)
    fates = run.summary["fates"]
    assert fates["trained"] == 4 * 6
    assert fates["issued"] == sum(fates[k] for k in ("trained", "filtered", "stale", "failed", "aborted"))
    assert fates["in_flight"] == fates["twice"] == 0
    assert run.summary["eval_before"] is not None
    assert run.summary["eval_after"] is not None
    assert "0 lost, 0 twice" in run.output
    assert (run.path / "report.html").stat().st_size > 10_000
    assert (run.path / "checkpoints" / "final" / "config.json").exists()
    assert len(list((run.path / "log").glob("engine-*.log"))) == 2
    assert not run.survivors


def test_the_task_of_the_quick_start_page_runs_as_it_is_printed_there(miles: Callable[..., Any], tmp_path: Path):
    page = (DOCS / "quickstart.md").read_text()
    for name, text in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    # Weights go over the disk here; the other run sends them through shared memory.
    words = ("rl", "@", "digits.toml", "--run.steps", "2", "--eval.num-prompts", "4", "--sync.way", "disk")
    run = miles(*words, name="digits")
    assert run.status == 0
    steps = [row for row in run.rows if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 <= row["reward/mean"] <= 1 for row in steps)
    assert all(row["reward/std"] > 0 for row in steps)
    assert steps[0]["logprob_gap/max"] <= 1e-4
    assert (run.path / "weights" / "version_000002").is_dir()
    assert not run.survivors
