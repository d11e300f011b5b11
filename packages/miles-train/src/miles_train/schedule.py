"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from miles_tito.shared.settings import SettingError

if TYPE_CHECKING:
    from .config import ScheduleConfig


def check_schedule(schedule: ScheduleConfig) -> None:
    """Refuse a decay without an end."""
    if schedule.kind != "constant" and schedule.total_steps is None:
        raise SettingError(
            f'`schedule.kind` is "{schedule.kind}" but `schedule.total_steps` is not set; '
            "give the number of optimizer steps (train steps times minibatches) that the decay lasts."
        )


def lr_factor(step: int, schedule: ScheduleConfig) -> float:
    """What `lr` is multiplied by at optimizer step `step` (0 for the first).

    Warm-up grows linearly to 1; then constant, linear or half-cosine decay to `min_lr_ratio` at `total_steps`.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    assert schedule.total_steps is not None, "check_schedule was not called"
    progress = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
    left = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * left
