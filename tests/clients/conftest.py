"""Real agents, installed once into a cache folder, each run in a network namespace with loopback only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("MILES_CLIENTS", Path.home() / ".cache" / "miles" / "clients"))
UNREACHABLE = 75


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder with the agents; skips only where the registry cannot be reached."""
    done = subprocess.run([HERE / "setup.sh", CACHE], capture_output=True, text=True, timeout=600)
    if done.returncode == UNREACHABLE:
        pytest.skip(f"the agents cannot be installed: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return CACHE


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run_agent(clients: Path) -> Run:
    """Plays a task with an agent; what the session recorded."""

    def run(agent: str, play: str, *more: str, fail_at: int | None = None, **options: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "agent": agent,
            "play": play,
            "clients": str(clients),
            "more": more,
            "options": options,
        }
        asked["fail_at"] = fail_at
        command = ["unshare", "--map-root-user", "--net", sys.executable, str(HERE / "stage.py"), json.dumps(asked)]
        paths = [str(HERE.parents[1] / "packages" / "miles-tito" / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        for ended in result["runs"]:
            assert ended["status"] == 0, f"{ended['out']}\n{ended['err']}\n{done.stderr[-2000:]}"
        return result

    return run
