"""From the `[monitor]` section to one monitor. A built-in one is a module of this folder and a line of `_built_in`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_tito.shared.plugins import load
from miles_tito.shared.settings import SettingError

from .base import Monitor, MonitoredRun, MultiMonitor
from .config import MonitorConfig
from .jsonl import METRICS_FILE, JsonlMonitor


def _built_in(config: MonitorConfig) -> dict[str, object]:
    """Each monitor of this folder with its setting; imported only when asked for: wandb alone costs a second."""
    return {
        "console:ConsoleMonitor": config.console,
        "trace:TraceMonitor": config.trace,
        "tensorboard:TensorboardMonitor": config.tensorboard,
        "prometheus:PrometheusMonitor": config.prometheus,
        "wandb:WandbMonitor": config.wandb,
        "trackio:TrackioMonitor": config.trackio,
    }


def build_monitor(
    config: MonitorConfig, *, run_dir: Path, total_steps: int, run_config: Mapping[str, Any] | None = None
) -> MultiMonitor:
    """Every monitor that `config` asks for, `metrics.jsonl` always.

    Args:
        run_dir, total_steps, run_config: see `MonitoredRun`.

    Raises:
        MissingDependency: a tracker is configured but not installed; the message is the command that installs it.
        SettingError: a monitor of the user's cannot be imported, or is none.
    """
    is_resumed = (run_dir / METRICS_FILE).exists()
    run = MonitoredRun(path=run_dir, total_steps=total_steps, config=run_config or {}, is_resumed=is_resumed)
    custom = config.load_plugins()
    trackers: list[Monitor] = [
        load(f"miles_core.monitor.{target}", what="monitor")(run, **arguments)
        for target, setting in _built_in(config).items()
        if (arguments := _arguments(setting)) is not None
    ]
    trackers += [_checked(make(run), name) for name, make in custom]
    return MultiMonitor([JsonlMonitor(run_dir, fsync_interval_s=config.fsync_interval_s)], trackers)


def _arguments(setting: Any) -> dict[str, Any] | None:
    """What the setting of a built-in monitor gives its constructor; None where it is off."""
    match setting:
        case False | "off":
            return None
        case True:
            return {}
        case str():
            return {"mode": setting}
        case _:
            return {"config": setting} if setting.enabled else None


def _checked(monitor: Any, name: str) -> Monitor:
    missing = [m for m in ("log", "log_late", "rewind", "event", "finish") if not callable(getattr(monitor, m, None))]
    if missing:
        raise SettingError(
            f"`monitor.custom` names {name!r}, which makes a {type(monitor).__name__} without {', '.join(missing)}. "
            "Derive it from `miles_core.monitor.Monitor`, whose methods do nothing until they are overridden."
        )
    return monitor
