"""Where metrics, spans and the summary of a run go. Libraries return numbers; only monitors write them."""

from .base import Monitor, MonitoredRun, MultiMonitor, RunSummary, StepError
from .config import MonitorConfig, TrackioConfig, WandbConfig, build_monitor
from .jsonl import JsonlMonitor, read_metrics, read_summary
from .usage import Span, busy_fraction, utilisation

__all__ = [
    "JsonlMonitor",
    "Monitor",
    "MonitorConfig",
    "MonitoredRun",
    "MultiMonitor",
    "RunSummary",
    "Span",
    "StepError",
    "TrackioConfig",
    "WandbConfig",
    "build_monitor",
    "busy_fraction",
    "read_metrics",
    "read_summary",
    "utilisation",
]
