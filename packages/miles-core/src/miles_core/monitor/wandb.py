"""Weights & Biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_tito.errors import MissingDependency

from .config import WandbConfig
from .summary import RunSummary

try:
    import wandb
except ImportError as error:
    raise MissingDependency("`monitor.wandb` needs the wandb package: pip install 'miles-core[wandb]'") from error

EVAL_STEP = "eval/step"
"""Axis of everything under `eval/`."""


class WandbMonitor:
    """One W&B run; in offline mode everything stays under `<run>/wandb`."""

    def __init__(self, config: WandbConfig, *, run_dir: Path, run_name: str, run_config: Mapping[str, Any]) -> None:
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=run_name,
            dir=str(run_dir),
            config=dict(run_config),
            settings=wandb.Settings(silent=True, console="off"),
        )

        # W&B's own step never goes back, and the score of an evaluation beside training belongs to an earlier one.
        self._run.define_metric(EVAL_STEP)
        self._run.define_metric("eval/*", step_metric=EVAL_STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: float(value) for name, value in metrics.items()}
        if any(name.startswith("eval/") for name in row):
            row[EVAL_STEP] = float(step)
        self._run.log(row, step=step)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Joins the row of the present step, on an axis of its own."""
        self._run.log({name: float(value) for name, value in metrics.items()} | {EVAL_STEP: float(step)}, commit=False)

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        """Spans belong to the trace."""

    def finish(self, summary: RunSummary) -> None:
        self._run.summary.update(dataclasses.asdict(summary))
        self._run.finish(exit_code=1 if summary.status == "failed" else 0)
