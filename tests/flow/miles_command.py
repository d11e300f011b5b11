"""The `miles` command as a shell would start it, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

MARK = "MILES_TEST_OF_COMMANDS"
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
    """`miles` in a session of its own, with a mark in the environment that all its processes inherit."""

    def __init__(self, folder: Path, *words: str) -> None:
        """
        Args:
            words: settings of `miles rl @ run.toml`, or another command and its words.
        """
        if not words or words[0].startswith("--"):
            words = ("rl", "@", "run.toml", *words)
        self.run_dir = folder / "runs" / "nap"
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("miles"), *words],
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

    def is_driver(self, pid: int) -> bool:
        return pid == self._process.pid

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

    def kill_driver(self) -> None:
        """`kill -9` of the first process alone; returns when all that it had started have ended by themselves."""
        self._process.kill()
        self._process.communicate()
        end = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < end, f"outlived their driver: {[' '.join(p.cmdline())[:100] for p in left]}"
            time.sleep(0.1)

    def kill(self) -> None:
        """`kill -9` of everything at once."""
        for process in self.processes():
            process.kill()
        if self._process.returncode is None:
            self._process.communicate()
