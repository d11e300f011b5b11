"""Weights & Biases."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path

from miles_tito.errors import MissingDependency

from .base import Monitor, MonitoredRun, RunSummary
from .config import WandbConfig

try:
    import wandb
except ImportError as error:
    raise MissingDependency("`monitor.wandb` needs the wandb package: pip install 'miles-core[wandb]'") from error

STEP = "step"
"""Axis of every metric but those of evaluations."""
EVAL_STEP = "eval/step"
"""Axis of everything under `eval/`."""
RUN_ID = "wandb_run_id"
"""File in the run directory, so that a resumed run goes on in the same W&B run."""


class WandbMonitor(Monitor):
    """One W&B run; in offline mode everything stays under `<run>/wandb`.

    Steps that are done again are drawn over the old ones; W&B keeps both.
    """

    def __init__(self, run: MonitoredRun, *, config: WandbConfig) -> None:
        self._run = wandb.init(
            id=_run_id(run.path / RUN_ID),
            resume="allow",
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=run.name,
            dir=str(run.path),
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B's own step never goes back. A resumed run may, and the score of an evaluation beside training belongs to
        # an earlier step.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric(EVAL_STEP)
        self._run.define_metric("eval/*", step_metric=EVAL_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {STEP: float(step)} | {name: float(value) for name, value in metrics.items()}
        if any(name.startswith("eval/") for name in row):
            row[EVAL_STEP] = float(step)
        self._run.log(row)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row without a step of training, on the axis of evaluations."""
        self._run.log({name: float(value) for name, value in metrics.items()} | {EVAL_STEP: float(step)})

    def finish(self, summary: RunSummary) -> None:
        self._run.summary.update(dataclasses.asdict(summary))
        self._run.finish(exit_code=1 if summary.status == "failed" else 0)


def _run_id(file: Path) -> str:
    """The id that W&B knows the run by: made once, then kept."""
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")
