"""A run in which processes of every kind are killed goes on, and proves that nothing was lost or used twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running import QUICK, Run

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = 80


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, *QUICK, "--run.steps", str(STEPS), "--engines.rollout.count", "2")
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
    run.named("ray::SessionServer").kill()
    run.wait_for_steps(1, "the session server's death")
    run.named("ray::RolloutWorker").kill()
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
