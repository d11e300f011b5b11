"""SFT before RL: the same trainer ranks, the same loop, its own metrics under `<run>/sft/`."""

from __future__ import annotations

import time
from pathlib import Path

from .cluster import Trainers
from .config import Config
from .monitor import JsonlMonitor, RunSummary
from .rundir import RunDir
from .sft import train_supervised


async def warm_up(config: Config, *, trainers: Trainers, model: Path, run_dir: RunDir) -> Path:
    """Train `config.sft.steps` steps on demonstrations; returns the folder of the warmed-up model."""
    run_dir.sft.mkdir()
    monitor = JsonlMonitor(run_dir.sft)
    began = time.monotonic()
    await train_supervised(config, trainers=trainers, model=model, monitor=monitor)
    out = run_dir.checkpoints / "sft"
    await trainers.export(out)
    monitor.finish(RunSummary(status="finished", steps=config.sft.steps, seconds=time.monotonic() - began))
    return out
