"""SFT before RL: the same trainer ranks, the same loop, its own metrics under `<run>/sft/`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.monitor import JsonlMonitor, RunSummary
from miles_core.parts import Trainers

from .sft import train_supervised


async def warm_up(config: Config, *, trainers: Trainers, model: Path, run_dir: RunDir, out: Path) -> None:
    """Train `config.sft.steps` steps on demonstrations; the warmed-up model appears whole at `out`."""
    shutil.rmtree(run_dir.sft, ignore_errors=True)  # of a start that was killed before it was done
    run_dir.sft.mkdir()
    monitor = JsonlMonitor(run_dir.sft)
    began = time.monotonic()
    await train_supervised(config, trainers=trainers, model=model, monitor=monitor)
    await trainers.export(out)
    monitor.finish(RunSummary(status="finished", steps=config.sft.steps, seconds=time.monotonic() - began))
