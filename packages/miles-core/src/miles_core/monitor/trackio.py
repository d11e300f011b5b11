"""trackio, a tracker that keeps its database on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from miles_tito.errors import MissingDependency

from .base import Monitor, MonitoredRun, RunSummary
from .config import TrackioConfig

try:
    import trackio
except ImportError as error:
    raise MissingDependency("`monitor.trackio` needs the trackio package: pip install 'miles-core[trackio]'") from error


class TrackioMonitor(Monitor):
    """One trackio run; look with `trackio show --project <project>`.

    trackio cannot take rows back: steps that are done again appear twice.
    """

    def __init__(self, run: MonitoredRun, *, config: TrackioConfig) -> None:
        self._run = trackio.init(
            project=config.project,
            name=run.name,
            space_id=config.space_id,
            resume="allow" if run.is_resumed else "never",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    log_late = log

    def finish(self, summary: RunSummary) -> None:
        self._run.finish()
