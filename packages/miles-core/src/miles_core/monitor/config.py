"""The `[monitor]` section, and the monitors that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_tito.shared.plugins import Plugin, load, resolve
from miles_tito.shared.settings import SettingError, require

from .base import Monitor, MonitoredRun, MultiMonitor
from .jsonl import METRICS_FILE, JsonlMonitor


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases, `pip install 'miles-core[wandb]'`."""

    enabled: bool = False
    """Send metrics to Weights & Biases."""
    project: str = "miles"
    """Project that the run appears under."""
    entity: str | None = None
    """Team or user; none uses your default."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run directory; `wandb sync` uploads later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioConfig:
    """trackio, a local tracker, `pip install 'miles-core[trackio]'`."""

    enabled: bool = False
    """Write metrics to trackio's database; `trackio show` opens the dashboard."""
    project: str = "miles"
    """Project that the run appears under."""
    space_id: str | None = None
    """Hugging Face Space to log to; none stays on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusConfig:
    """An endpoint for Prometheus, `pip install 'miles-core[prometheus]'`."""

    enabled: bool = False
    """Serve the latest metrics at http://host:port/metrics while the run goes on."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 9400
    """Port to listen on; 0 takes a free one and says which in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Where metrics go besides `metrics.jsonl`, which is always written."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """rich draws a live table, plain prints one line a step; auto is rich on a terminal and plain elsewhere."""
    trace: bool = True
    """Write trace.json, spans of generation, training, sync and evaluation for https://ui.perfetto.dev."""
    tensorboard: bool = False
    """Write TensorBoard events under `<run>/tensorboard`; needs `pip install 'miles-core[tensorboard]'`."""
    fsync_interval_s: float = 5.0
    """Seconds between forced writes of metrics.jsonl to the device; 0 forces every row."""
    alarms: bool = True
    """Warn in the log about starving or idle parts, drifting log-probs, groups without signal, and stalls."""
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    custom: tuple[str | Plugin, ...] = ()
    """Monitors of your own, each an import string `module:Class`, or a table with its `name` and `args`. A class is
    called with the run (`miles_core.monitor.MonitoredRun`) and its args; one that fails later is switched off."""

    def __post_init__(self) -> None:
        require(self.fsync_interval_s >= 0, "fsync_interval_s", self.fsync_interval_s, "0 or more")
        for choice in self.custom:
            if ":" not in _name(choice):
                raise SettingError(
                    f"`custom` has {_name(choice)!r}, which is no import string such as 'my_module:MyMonitor'; the "
                    "monitors that Miles brings have keys of their own."
                )

    def load_plugins(self) -> list[tuple[str, Callable[..., Any]]]:
        """Import the monitors of `custom`: the name of each and what makes it; nothing is made.

        Raises:
            SettingError: an import string leads nowhere, or what it names does not take its arguments.
        """
        return [(_name(choice), resolve(choice, {}, kind="monitor", positional=1)) for choice in self.custom]


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


def _name(choice: str | Plugin) -> str:
    return choice if isinstance(choice, str) else choice.name
