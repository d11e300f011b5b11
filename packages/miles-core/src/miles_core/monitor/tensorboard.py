"""TensorBoard event files, written without TensorFlow or torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from miles_tito.errors import MissingDependency

from .base import Monitor, MonitoredRun, RunSummary

try:
    # generated code, which pyright cannot see into
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise MissingDependency(
        "`monitor.tensorboard` needs the tensorboard package: pip install 'miles-core[tensorboard]'"
    ) from error


class TensorboardMonitor(Monitor):
    """One scalar a metric under `<run>/tensorboard`; look with `tensorboard --logdir <run>`."""

    def __init__(self, run: MonitoredRun) -> None:
        self._writer = EventFileWriter(str(run.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    log_late = log

    def rewind(self, step: int) -> None:
        """TensorBoard drops what this directory says of later steps."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def finish(self, summary: RunSummary) -> None:
        self._writer.close()
