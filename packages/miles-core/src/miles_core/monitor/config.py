"""Settings of the monitors: the `[monitor]` section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from miles_tito.shared.plugins import Plugin, resolve
from miles_tito.shared.settings import SettingError, require


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


def _name(choice: str | Plugin) -> str:
    return choice if isinstance(choice, str) else choice.name
