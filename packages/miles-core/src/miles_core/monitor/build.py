"""From the `[monitor]` section to one monitor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Monitor, MultiMonitor
from .config import MonitorConfig
from .console import ConsoleMonitor
from .jsonl import METRICS_FILE, JsonlMonitor
from .trace import TraceMonitor


def build_monitor(
    config: MonitorConfig, *, run_dir: Path, total_steps: int, run_config: Mapping[str, Any] | None = None
) -> MultiMonitor:
    """Every monitor that `config` asks for, `metrics.jsonl` always.

    Args:
        run_dir: an existing directory, also of a run that goes on; its name is the run's name in the trackers.
        total_steps: for the progress and the time left.
        run_config: the resolved configuration as plain data, shown by trackers.

    Raises:
        MissingDependency: a tracker is configured but not installed; the message is the command that installs it.
    """
    is_resumed = (run_dir / METRICS_FILE).exists()
    # A tracker is imported only when asked for: wandb alone costs a second.
    optional: list[Monitor] = []
    if config.console != "off":
        optional.append(ConsoleMonitor(total_steps=total_steps, mode=config.console))
    if config.trace:
        optional.append(TraceMonitor(run_dir))
    if config.tensorboard:
        from .tensorboard import TensorboardMonitor

        optional.append(TensorboardMonitor(run_dir))
    if config.prometheus.enabled:
        from .prometheus import PrometheusMonitor

        optional.append(PrometheusMonitor(config.prometheus, run_name=run_dir.name))
    if config.wandb.enabled:
        from .wandb import WandbMonitor

        optional.append(WandbMonitor(config.wandb, run_dir=run_dir, run_name=run_dir.name, run_config=run_config or {}))
    if config.trackio.enabled:
        from .trackio import TrackioMonitor

        tracker = TrackioMonitor(
            config.trackio, run_name=run_dir.name, run_config=run_config or {}, is_resumed=is_resumed
        )
        optional.append(tracker)
    required = JsonlMonitor(run_dir, fsync_interval_s=config.fsync_interval_s)
    return MultiMonitor(required=[required], optional=optional)
