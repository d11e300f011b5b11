"""A run of the `miles` command that goes on while a test looks at it and kills its processes."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

MARK = "MILES_TEST_RUN"
PATIENCE_S = 200.0

QUICK = (
    *("quickstart", "--run.name", "survivor", "--run.dir", "runs", "--sft.steps", "12"),
    *("--sft.schedule.kind", "constant", "--eval.at-start", "false", "--eval.num-prompts", "8"),
    *("--rollout.groups-per-step", "6"),
)
"""A run that is about surviving rather than learning."""


class Run:
    """A run in a process of its own, and its processes by kind."""

    def __init__(self, folder: Path, *words: str) -> None:
        """
        Args:
            words: of a command that runs or resumes `runs/survivor` in `folder`.
        """
        self.path = folder / "runs" / "survivor"
        self._mark = uuid.uuid4().hex
        self._output = folder / f"output-{self._mark}.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "miles_core", *words],
                cwd=folder,
                env={**os.environ, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def steps(self) -> int:
        """Trained so far."""
        metrics = self.path / "metrics.jsonl"
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(row)["step"] for row in rows if '"loss/total"' in row), default=0)

    def processes(self) -> list[psutil.Process]:
        """Everything that this run started and that still runs."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def named(self, sign: str) -> psutil.Process:
        """The one below the driver whose title or command line has this sign. A title may lie where the mark was."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if sign in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process with {sign!r} in its command line")

    def engine(self, port: int) -> psutil.Process:
        """The main process of the engine on `port`: what its guard started."""
        [process] = self.named(
            f"sglang_cpu --model-path {self.path / 'model'} --host 127.0.0.1 --port {port}"
        ).children()
        return process

    def wait_until(self, what: str, is_true: Callable[[], object], *, interval_s: float = 0.1) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_true():
            assert self._process.poll() is None, f"it ended while this test waited for {what}:\n{self.output[-3000:]}"
            assert time.monotonic() < end, f"waited for {what}:\n{self.output[-3000:]}"
            time.sleep(interval_s)

    def wait_for_steps(self, count: int, behind: str) -> None:
        goal = self.steps + count
        self.wait_until(f"a step behind {behind}", lambda: self.steps >= goal)

    @property
    def log(self) -> str:
        """Of the driver."""
        return (self.path / "log" / "driver.log").read_text()

    def says(self, words: str) -> bool:
        """Whether the driver's log has these words."""
        return words in self.log

    def ports(self) -> list[int]:
        """Of the engines, as the driver's log names them."""
        line = re.search("engines at (.*)", self.log)
        assert line is not None
        return [int(url.rpartition(":")[2]) for url in line[1].split(", ")]

    def finish(self) -> int:
        return self._process.wait(PATIENCE_S)

    def happened(self) -> list[tuple[str, str, str]]:
        """Kind, subject and text of what the ledger notes beside groups."""
        with closing(sqlite3.connect(self.path / "ledger.db")) as db:
            return list(db.execute("SELECT kind, subject, text FROM happenings ORDER BY rowid"))

    def kill_driver(self) -> None:
        """`kill -9` of the first process alone; returns when everything that it had started has ended by itself."""
        self._process.kill()
        self._process.wait()
        end = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < end, f"outlived their driver: {[' '.join(p.cmdline())[:100] for p in left]}"
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self._process.wait()
