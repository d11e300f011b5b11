"""trackio, a tracker that keeps its database on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_tito.errors import MissingDependency

from .config import TrackioConfig
from .summary import RunSummary

try:
    import trackio
except ImportError as error:
    raise MissingDependency("`monitor.trackio` needs the trackio package: pip install 'miles-core[trackio]'") from error


class TrackioMonitor:
    """One trackio run; look with `trackio show --project <project>`."""

    def __init__(
        self, config: TrackioConfig, *, run_name: str, run_config: Mapping[str, Any], is_resumed: bool = False
    ) -> None:
        self._run = trackio.init(
            project=config.project,
            name=run_name,
            space_id=config.space_id,
            resume="allow" if is_resumed else "never",
            config=dict(run_config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log(step, metrics)

    def rewind(self, step: int) -> None:
        """trackio cannot take rows back: steps that are done again appear twice."""

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        """Spans belong to the trace."""

    def finish(self, summary: RunSummary) -> None:
        self._run.finish()
