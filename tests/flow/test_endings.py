"""How `miles rl` ends when somebody presses Ctrl-C or something is wrong: soon, with the right status, leaving nothing.

The command runs as a shell would start it, with Ray, sessions, a trainer and a worker; the engine is a scripted server
in this process, attached by its URL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_sglang import FakeSGLang
from miles_train.models import build_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MARK = "MILES_TEST_OF_ENDINGS"
START_S = 90.0
"""Patience with the start of a run on a busy machine."""
STOP_S = 10.0
"""What a user waits for after Ctrl-C."""

ENV = '''
import asyncio

import httpx
from miles_tito.records import EpisodeResult, Outcome, Prompt


class Napping:
    """Asks the policy once; after the first episodes each sleeps for an hour."""

    def __init__(self, *, quick):
        self._quick = quick
        self._http = httpx.AsyncClient(trust_env=False)

    def tasks(self, split):
        return [Prompt(id=f"{split}-{i}", messages=({"role": "user", "content": str(i)},)) for i in range(50)]

    async def run(self, prompt, policy, ctx):
        answer = await self._http.post(
            policy.base_url + "/chat/completions",
            json={"messages": list(prompt.messages)},
            headers={"Authorization": "Bearer " + policy.api_key},
        )
        answer.raise_for_status()
        self._quick -= 1
        if self._quick < 0:
            await asyncio.sleep(3600)
        return EpisodeResult(outcome=Outcome.GRADED, reward=float(ctx.episode_id.endswith("/0")))

    async def aclose(self):
        await self._http.aclose()
'''

CONFIG = """
[run]
name = "nap"
dir = "runs"
steps = 9
[model]
path = "{model}"
max_context = 128
[env]
target = "nap:Napping"
args = {{ quick = 12 }}
[rollout]
group_size = 2
groups_per_step = 2
sampling = {{ max_tokens = 8 }}
[engines.rollout]
urls = ["{url}"]
start_timeout_s = 60
[train]
device = "cpu"
threads = 1
token_budget = 512
[sync]
verify = "none"
[eval]
at_start = false
at_end = false
[ray]
object_store_bytes = 100_000_000
[monitor]
console = "off"
"""


class Command:
    """`miles rl` in a session of its own, with a mark in the environment that all its processes inherit."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run_dir = folder / "runs" / "nap"
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("miles"), "rl", "@", "run.toml", *words],
            cwd=folder,
            env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + START_S
        while not is_true():
            assert self._process.poll() is None, f"it ended by itself:\n{self.output()}"
            assert time.monotonic() < end, f"nothing of it within {START_S:g} s"
            time.sleep(0.02)

    def interrupt(self, *, within_s: float = STOP_S) -> tuple[int, str]:
        """What a terminal does on Ctrl-C: SIGINT to the whole foreground group. Returns exit status and output."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self.end(within_s)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Exit status and output, once it ended by itself."""
        began = time.monotonic()
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            running = [" ".join(process.cmdline())[:100] for process in self.processes()]
            pytest.fail(f"still running after {time.monotonic() - began:.1f} s: {running}")
        return self._process.returncode, output

    def output(self) -> str:
        return self._process.communicate(timeout=5)[0]

    @property
    def steps(self) -> int:
        """Logged so far."""
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Everything that carries the mark and still runs."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def engine() -> Iterator[FakeSGLang]:
    """Answers three random tokens and the end of the turn."""
    rng = random.Random(0)

    def script(ids: Sequence[int]) -> list[int]:
        return [rng.randrange(300, 440) for _ in range(3)] + [2]

    fake = FakeSGLang(script)
    yield fake
    fake.stop()


@pytest.fixture
def miles(tmp_path: Path, model: Path, engine: FakeSGLang) -> Iterator[Callable[..., Command]]:
    """Starts the command beside a configuration and the environment that it names."""
    (tmp_path / "nap.py").write_text(ENV)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, url=engine.url))
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command(tmp_path, *words))
        return started[-1]

    yield start
    for command in started:
        command.kill()


def test_ctrl_c_in_the_middle_of_a_run_ends_it_and_accounts_for_every_group(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    command = miles()
    command.wait_until(lambda: command.steps >= 2)
    status, output = command.interrupt()
    assert command.processes() == []
    assert status == 130, output
    summary = command.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert summary["steps"] == command.steps
    fates = summary["fates"]
    assert fates["trained"] == 2 * command.steps
    assert fates["aborted"] >= 2, "some were asleep"
    assert fates["issued"] == sum(fates[fate] for fate in ("trained", "filtered", "stale", "failed", "aborted"))
    assert (fates["in_flight"], fates["twice"]) == (0, 0)
    assert f"interrupted after {command.steps} steps" in output
    assert (command.run_dir / "report.html").exists()
    assert not engine.is_paused, "the engine is left as it was"
    assert int(engine.version) >= command.steps


@pytest.mark.parametrize("moment", ["while Ray starts", "while the engine starts"])
def test_ctrl_c_during_the_start_ends_it(miles: Callable[..., Command], engine: FakeSGLang, moment: str) -> None:
    engine.is_starting = True
    command = miles()
    if moment == "while Ray starts":
        command.wait_until((command.run_dir / "log" / "driver.log").exists)
        status, output = command.interrupt(within_s=START_S)  # Ray cannot be interrupted; it starts, and then stops
    else:
        command.wait_until(lambda: "/model_info" in engine.paths)
        status, output = command.interrupt()
    assert command.processes() == []
    assert status == 130, output
    assert command.summary()["status"] == "interrupted"
    assert "Traceback" not in output


def test_an_engine_that_nobody_answers_for_is_told_with_its_address(miles: Callable[..., Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    command = miles("--engines.rollout.urls", f'["{url}"]', "--engines.rollout.start_timeout_s", "2")
    status, output = command.end(START_S)
    assert command.processes() == []
    assert status == 1, output
    assert f"No SGLang server answers at {url}" in output
    assert "Traceback" not in output
    assert command.summary()["status"] == "failed"


def test_a_wrong_import_string_is_told_before_any_engine_is_waited_for(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    engine.is_starting = True
    command = miles("--env.target", "nap:Naping")
    status, output = command.end(START_S)
    assert command.processes() == []
    assert status == 1, output
    assert "`env.target` is 'nap:Naping' but nap has no 'Naping'. Did you mean Napping?" in output
    assert "Traceback" not in output
    assert "Naping" in command.summary()["error"]
