"""`metrics.jsonl`: one row a logged step, readable after `kill -9`; and `summary.json` when the run ends.

Rows of steps that a run went back behind are kept in `metrics.discarded.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from miles_tito.shared.files import write_atomic

from .base import Monitor, RunSummary

METRICS_FILE = "metrics.jsonl"
DISCARDED_FILE = "metrics.discarded.jsonl"
SUMMARY_FILE = "summary.json"


class JsonlMonitor(Monitor):
    """Appends rows `{"step": 3, "time": …, "reward/mean": …}`.

    A row is one `write` and therefore survives the death of the process; `fsync_interval_s` bounds what the death
    of the machine can take. Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".
    """

    def __init__(
        self, run_dir: Path, *, fsync_interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dir = run_dir
        self._interval = fsync_interval_s
        self._clock = clock
        self._synced = clock()
        self._path = run_dir / METRICS_FILE
        _drop_torn_row(self._path)
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of an earlier end; the run goes on
        self._fd = self._open()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, "time": round(time.time(), 3)} | {name: _to_json(v) for name, v in metrics.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(
                f"Only {written} of {len(line)} bytes of step {step} reached {self._dir / METRICS_FILE}. "
                "Free disk space under the run directory."
            )
        if self._clock() - self._synced >= self._interval:
            self._sync()

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Another row of that step; readers merge the two."""
        self.log(step, metrics)

    def rewind(self, step: int) -> None:
        """Move the rows of later steps aside; killed in between, it leaves a row in both files rather than in none."""
        self._sync()
        kept, gone = _split(self._path.read_bytes(), step)
        if not gone:
            return
        _append_missing(self._dir / DISCARDED_FILE, gone)
        write_atomic(self._path, b"".join(kept), durable=True)
        os.close(self._fd)
        self._fd = self._open()

    def finish(self, summary: RunSummary) -> None:
        self._sync()
        os.close(self._fd)
        write_atomic(self._dir / SUMMARY_FILE, json.dumps(asdict(summary), indent=2) + "\n")

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = self._clock()


def read_metrics(run_dir: Path, file: str = METRICS_FILE) -> list[dict[str, float]]:
    """The rows of a run, those of one step merged; a torn last row is left out, a missing file is an empty run.

    `time` of a merged row is the first one's: what comes late belongs to the step, and does not move it.
    """
    path = run_dir / file
    if not path.exists():
        return []
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().split(b"\n"):
        if (row := _row(line)) is None:
            continue
        merged = rows.setdefault(row["step"], {})
        merged |= {name: float(value) for name, value in row.items() if name != "time" or name not in merged}
    return [rows[step] for step in sorted(rows)]


def read_summary(run_dir: Path) -> RunSummary | None:
    """The summary of a run, None while it has not finished."""
    path = run_dir / SUMMARY_FILE
    return RunSummary(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _split(content: bytes, step: int) -> tuple[list[bytes], list[bytes]]:
    """Rows up to `step`, and those behind it; what is no row stays where it is, and readers pass over it."""
    kept: list[bytes] = []
    gone: list[bytes] = []
    for line in content.splitlines(keepends=True):
        row = _row(line)
        (gone if row is not None and row["step"] > step else kept).append(line)
    return kept, gone


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of the file; None for one that a failing disk or an editor left unreadable."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _append_missing(path: Path, lines: Sequence[bytes]) -> None:
    """Add the lines that an earlier try, killed in the middle, has not added."""
    _drop_torn_row(path)
    there = set(path.read_bytes().splitlines(keepends=True)) if path.exists() else set[bytes]()
    with path.open("ab") as file:
        file.writelines(line for line in lines if line not in there)
        file.flush()
        os.fsync(file.fileno())


def _to_json(value: float) -> float | str:
    """`value` as a plain number (numpy scalars included), or as its name where JSON has none."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _drop_torn_row(path: Path) -> None:
    """Cut a row that an earlier process was killed in, so that the next one starts on its own line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
