"""Settings are refused where they are impossible or would have no effect."""

from __future__ import annotations

import subprocess
import sys

import pytest
from miles_train import ConfigError, LossConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from miles_train.schedule import check_schedule, lr_factor


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OptimizerConfig(lr=-1.0), "`lr` is -1.0; it must be 0 or more"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "`betas`"),
        (lambda: OptimizerConfig(max_grad_norm=0.0), "`max_grad_norm` is 0.0"),
        (lambda: ScheduleConfig(kind="step"), "`kind` is 'step'"),  # pyright: ignore[reportArgumentType]
        (lambda: ScheduleConfig(warmup_steps=5, total_steps=5), "`total_steps` is 5"),
        (lambda: LossConfig(kind="gspo"), "`kind` is 'gspo'; it must be one of policy, sft"),
        (lambda: LossConfig(normalization="dr_grpo"), "`max_tokens`"),
        (lambda: LossConfig(clip_low=1.5), "`clip_low` is 1.5"),
        (lambda: LossConfig(dual_clip=1.1), "above 1 \\+ clip_high = 1.28"),
        (lambda: LossConfig(tis_cap=2.0), 'Set old_logprobs = "trainer"'),
        (lambda: LossConfig(kind="sft", kl_coef=0.1), "`kl_coef` belongs to kind 'policy' and has no effect with"),
        (lambda: LossConfig(kind="my:loss", clip_low=0.1), "`clip_low` belongs to kind 'policy' and has no effect"),
        (lambda: LossConfig(args={"coef": 1.0}), "`args` belongs to a loss of your own and has no effect"),
        (lambda: LossConfig(kind="my:loss", clip=0.1, kl=1), "`clip`, `kl` belong to no kind of loss and have no"),
        (lambda: TrainConfig(ranks=0), "`ranks` is 0"),
        (lambda: TrainConfig(token_budget=1), "`token_budget` is 1"),
        (lambda: TrainConfig(dtype="float32", master_dtype="bfloat16"), "round away"),
        (lambda: check_schedule(ScheduleConfig(kind="cosine")), "`schedule.total_steps` is not set"),
    ],
)
def test_an_impossible_setting_is_refused_by_name_and_value(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(), [1, 1, 1, 1, 1, 1]),
        (ScheduleConfig(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
        (ScheduleConfig(kind="linear", total_steps=4), [1, 0.75, 0.5, 0.25, 0, 0]),
        (ScheduleConfig(kind="linear", total_steps=4, min_lr_ratio=0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (ScheduleConfig(kind="linear", warmup_steps=2, total_steps=4), [0.5, 1, 1, 0.5, 0, 0]),
        (ScheduleConfig(kind="cosine", total_steps=4), [1, 0.8535534, 0.5, 0.1464466, 0, 0]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule, expected):
    assert [lr_factor(step, schedule) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, miles_train; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
