"""A run in which processes of every kind are killed goes on, and proves that nothing was lost or used twice."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(420)]

MARK = "MILES_TEST_RUN"
STEPS = 60
PATIENCE_S = 200.0


class Run:
    """`miles quickstart` with two engines, and its processes by kind."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "runs" / "survivor"
        self._mark = uuid.uuid4().hex
        self._output = folder / "output.txt"
        words = (
            *("quickstart", "--run.name", "survivor", "--run.dir", "runs", "--run.steps", str(STEPS)),
            *("--sft.steps", "12", "--sft.schedule.kind", "constant", "--eval.at-start", "false"),
            *("--eval.num-prompts", "8", "--engines.rollout.count", "2", "--rollout.groups-per-step", "6"),
        )
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

    def says(self, words: str) -> bool:
        """Whether the driver's log has these words."""
        return words in (self.path / "log" / "driver.log").read_text()

    def ports(self) -> list[int]:
        """Of the engines, as the driver's log names them."""
        line = re.search("engines at (.*)", (self.path / "log" / "driver.log").read_text())
        assert line is not None
        return [int(url.rpartition(":")[2]) for url in line[1].split(", ")]

    def finish(self) -> int:
        return self._process.wait(PATIENCE_S)

    def happened(self) -> list[tuple[str, str, str]]:
        """Kind, subject and text of what the ledger notes beside groups."""
        with closing(sqlite3.connect(self.path / "ledger.db")) as db:
            return list(db.execute("SELECT kind, subject, text FROM happenings ORDER BY rowid"))

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self._process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.kill()
    for log in sorted((run.path / "log").glob("*.log")):
        print(f"---- {log.name}\n{log.read_text()[-3000:]}")


def test_a_run_survives_the_kill_of_an_engine_a_router_a_session_server_and_a_worker(run: Run):
    run.wait_until("two steps", lambda: run.steps >= 2)
    ports = run.ports()
    run.engine(ports[0]).kill()
    run.wait_for_steps(1, "the engine's death")
    run.named("smg::router").kill()
    run.wait_for_steps(1, "the router's death")
    run.named("ray::SessionActor").kill()
    run.wait_for_steps(1, "the session server's death")
    run.named("ray::WorkerActor").kill()
    run.wait_for_steps(1, "the worker's death")
    run.wait_until("the first engine's return", lambda: run.says(f":{ports[0]}: syncing → healthy"))
    run.wait_until("a weight update", lambda: is_paused(ports[1]), interval_s=0.002)
    run.engine(ports[1]).kill()
    run.wait_for_steps(1, "the death of an engine in a weight update")
    assert run.finish() == 0
    assert run.steps == STEPS
    assert "0 lost, 0 twice" in run.output
    fates = json.loads((run.path / "summary.json").read_text())["fates"]
    assert fates["trained"] == STEPS * 6
    assert fates["issued"] == sum(fates[k] for k in ("trained", "filtered", "stale", "failed", "aborted"))
    assert fates["in_flight"] == fates["twice"] == 0
    told = run.happened()
    for port in ports:
        assert any(kind == "engine" and subject.endswith(f":{port}") and "dead" in text for kind, subject, text in told)
    assert {"router", "session server", "worker"} <= {kind for kind, _, _ in told}
    assert run.processes() == []


def is_paused(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False, timeout=5).status_code == 503
    except httpx.HTTPError:
        return False
