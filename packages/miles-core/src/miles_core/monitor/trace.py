"""`trace.json`: spans of the run in the Chrome trace event format, for https://ui.perfetto.dev."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Monitor, MonitoredRun, RunSummary

TRACE_FILE = "trace.json"
COUNTERS = ("reward/mean", "staleness/mean", "engine/tokens_per_s", "buffer/queued", "eval/score")


class TraceMonitor(Monitor):
    """Writes each event as it comes.

    The array form of the format may lack its closing bracket, so the file of a killed run opens as well; `finish`
    closes it, which makes it strict JSON. A run that goes on opens it again and adds to it. Spans of one lane that
    overlap (hundreds of episodes at once) are spread over rows `lane`, `lane 2`, … because the viewers draw one row as
    a stack.
    """

    def __init__(self, run: MonitoredRun) -> None:
        path = run.path / TRACE_FILE
        self._rows: dict[str, list[float]] = {}
        self._thread_ids, size = _reopened(path)
        """Of each row, by its label."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._fd, size)
        self._first = size == 0
        self._last_time = 0.0

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        thread = self._thread(lane, self._free_row(lane, start, end))
        self._last_time = max(self._last_time, end)
        self._write(name=name, cat=lane, ph="X", ts=_microseconds(start), dur=_microseconds(end - start), tid=thread)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A mark at the step's end, which is the latest time any span has reported, and a few counters."""
        now = _microseconds(self._last_time)
        self._write(name=f"step {step}", ph="i", s="p", ts=now, tid=0)
        for name in COUNTERS:
            value = metrics.get(name)
            if value is not None and value == value:  # nan is not JSON
                self._write(name=name, ph="C", ts=now, tid=0, args={"value": float(value)})

    def rewind(self, step: int) -> None:
        """What happened, happened: the spans stay, and a mark says that the run went back."""
        if not self._first:
            self._write(name=f"back at step {step}", ph="i", s="p", ts=_microseconds(time.time()), tid=0)

    def finish(self, summary: RunSummary) -> None:
        os.write(self._fd, b"[]\n" if self._first else b"\n]\n")
        os.close(self._fd)

    def _free_row(self, lane: str, start: float, end: float) -> int:
        """The first row of `lane` whose last span ended by `start`."""
        ends = self._rows.setdefault(lane, [])
        for row, row_end in enumerate(ends):
            if row_end <= start:
                ends[row] = end
                return row
        ends.append(end)
        return len(ends) - 1

    def _thread(self, lane: str, row: int) -> int:
        label = lane if row == 0 else f"{lane} {row + 1}"
        if label not in self._thread_ids:
            self._thread_ids[label] = len(self._thread_ids) + 1
            self._write(name="thread_name", ph="M", tid=self._thread_ids[label], args={"name": label})
        return self._thread_ids[label]

    def _write(self, **event: Any) -> None:
        separator = "[\n" if self._first else ",\n"
        self._first = False
        os.write(self._fd, (separator + json.dumps({"pid": 1} | event, allow_nan=False)).encode())


def _reopened(path: Path) -> tuple[dict[str, int], int]:
    """The rows that an earlier start of the run has named, and the length of the file up to its last whole event."""
    threads: dict[str, int] = {}
    size = 0
    if path.exists():
        with path.open("rb") as file:
            offset = 0
            for line in file:
                text = line.strip().rstrip(b",")
                try:
                    event = json.loads(text) if text != b"[" else None
                except ValueError:
                    break  # the closing bracket, or an event that the process was killed in
                if isinstance(event, dict):
                    size = offset + len(line.rstrip(b"\n").rstrip(b","))
                    if event.get("name") == "thread_name":
                        threads[event["args"]["name"]] = event["tid"]
                offset += len(line)
    return threads, size


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
