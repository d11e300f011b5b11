"""Runs of the `miles` command with every real part, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

MARK = "MILES_TEST_RUN"


@dataclass(frozen=True)
class Finished:
    """What a run left."""

    status: int
    output: str
    path: Path
    survivors: list[str]
    """Command lines of its processes that were still alive when it had returned."""

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def summary(self) -> Mapping[str, Any]:
        return json.loads((self.path / "summary.json").read_text())


@pytest.fixture
def miles(tmp_path: Path) -> Callable[..., Finished]:
    """`miles(words…, name=…)` runs the command in `tmp_path` and waits for it."""

    def run(*words: str, name: str, timeout_s: float = 280) -> Finished:
        mark = uuid.uuid4().hex
        process = subprocess.run(
            [sys.executable, "-m", "miles_core", *words],
            cwd=tmp_path,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        path = tmp_path / "runs" / name
        if process.returncode:
            for log in sorted((path / "log").glob("*.log")):
                print(f"---- {log.name}\n{log.read_text()[-3000:]}")
        print(process.stdout)
        return Finished(process.returncode, process.stdout, path, _alive(mark))

    return run


def _alive(mark: str) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
