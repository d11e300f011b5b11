"""A whole run in low precision: trainer ranks, Ray, real SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_in_low_precision_trains_on_the_very_weights_that_sampled_and_keeps_its_recipe(
    miles: Callable[..., Any],
):
    run = miles(
        *("quickstart", "--run.name", "low", "--run.steps", "2", "--run.dir", "runs"),
        *("--quant.format", "mxfp8", "--quant.quantize-activations", "false", "--train.ranks", "2"),
        *("--sft.steps", "12", "--sft.schedule.kind", "constant", "--eval.num-prompts", "8"),
        *("--rollout.groups-per-step", "4", "--rollout.max-staleness", "0"),
        name="low",
    )
    assert run.status == 0
    steps = [row for row in run.rows if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2]
    # Rounding alone moves log-probs by hundredths: this equality means that both sides round alike.
    assert all(row["logprob_gap/same_version_max"] <= 1e-4 for row in steps)
    assert not run.survivors

    other = miles("resume", str(run.path), "--more", "1", "--quant.format", "fp8", name="low")
    assert other.status == 1
    assert 'quant.format was "mxfp8" and is "fp8".' in other.output
