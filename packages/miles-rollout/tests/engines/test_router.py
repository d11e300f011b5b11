"""The router on fake engines: the real smg, no SGLang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from miles_rollout.engines import EngineStartError, EngineVersionError
from miles_rollout.engines.router import ROUTING_KEY, Router
from miles_tito import EngineError
from miles_tito.shared.http import Answer, call_once

needs_smg = pytest.mark.skipif(find_spec("smg") is None, reason="smg is not installed")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(log_path=tmp_path / "router.log")
    yield router
    router.stop()


def generate(router: Router, key: str, **body: Any) -> str:
    """Send one request of session `key`; returns the url of the engine that answered."""
    answer = post(router, key, {"input_ids": [1], **body})
    assert answer.is_ok, answer.excerpt()
    return answer.json()["engine"]


def post(router: Router, key: str, body: dict[str, Any]) -> Answer:
    return call_once("POST", f"{router.url}/generate", json=body, headers={ROUTING_KEY: key}, timeout_s=30)


@needs_smg
def test_a_session_stays_on_its_engine(router: Router, fake_engine: Callable[[], Any]):
    engines = [fake_engine(), fake_engine()]
    router.start([engine.url for engine in engines])
    homes = {f"session-{i}": generate(router, f"session-{i}") for i in range(12)}
    assert set(homes.values()) == {engine.url for engine in engines}
    for _ in range(3):
        assert {key: generate(router, key) for key in homes} == homes


@needs_smg
def test_new_sessions_go_to_the_engine_with_the_fewest_requests(router: Router, fake_engine: Callable[[], Any]):
    engines = {engine.url: engine for engine in (fake_engine(), fake_engine())}
    router.start(list(engines))
    busy = engines[generate(router, "long")]
    idle = next(engine for engine in engines.values() if engine is not busy)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(generate, router, "long", hold=True) for _ in range(4)]
        for _ in running:
            assert busy.held.acquire(timeout=20)
        assert {generate(router, f"new-{i}") for i in range(10)} == {idle.url}
        assert generate(router, "long") == busy.url
        busy.release.set()
        assert {future.result() for future in running} == {busy.url}


@needs_smg
def test_every_field_of_a_request_reaches_the_engine(router: Router, fake_engine: Callable[[], Any]):
    engine = fake_engine()
    router.start([engine.url])
    sent = {
        "rid": "r1",
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 4, "stop_token_ids": [2], "sampling_seed": 5},
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
        "return_prompt_token_ids": True,
        "session_id": "s",
        "extra_key": "k",
        "a_field_of_tomorrow": {"nested": [1]},
    }
    received = post(router, "s", sent).json()["body"]
    assert {key: received.get(key) for key in sent} == sent


@needs_smg
def test_a_removed_engine_gets_no_traffic_and_can_come_back(router: Router, fake_engine: Callable[[], Any]):
    leaving, staying = fake_engine(), fake_engine()
    router.start([leaving.url, staying.url])
    homes = {f"session-{i}": generate(router, f"session-{i}") for i in range(12)}
    router.remove_worker(leaving.url)
    assert router.workers() == {staying.url: True}
    before = len(leaving.generated())
    assert {generate(router, key) for key in homes} == {staying.url}
    assert len(leaving.generated()) == before
    router.add_worker(leaving.url)
    router.add_worker(leaving.url)
    assert router.workers() == {staying.url: True, leaving.url: True}


@needs_smg
def test_a_removal_is_asked_for_once_however_long_it_takes(
    router: Router, fake_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    """smg queues removals: a second one takes the engine away again after it has come back."""
    engine, other = fake_engine(), fake_engine()
    router.start([engine.url, other.url])
    told, workers, call = router._workers(), router._workers, router._call
    still_listed, removals = iter(range(3)), list[str]()

    def counting(method: str, path: str, **options: Any) -> Any:
        removals.extend([path] if method == "DELETE" else [])
        return call(method, path, **options)

    monkeypatch.setattr(router, "_workers", lambda: workers() if next(still_listed, None) is None else told)
    monkeypatch.setattr(router, "_call", counting)
    router.remove_worker(engine.url)
    assert router.workers() == {other.url: True}
    assert len(removals) == 1


@needs_smg
def test_a_router_without_engines_runs_but_is_not_healthy(router: Router):
    router.start()
    assert not router.health()
    assert router.workers() == {}


@needs_smg
def test_an_engine_that_nothing_listens_for_is_an_error(router: Router):
    router.start()
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1 did not become a worker of the router in 1 s"):
        router.add_worker("http://127.0.0.1:1", timeout_s=1)


@needs_smg
def test_a_failing_request_is_not_sent_twice(router: Router, fake_engine: Callable[[], Any]):
    engine = fake_engine()
    router.start([engine.url])
    engine.answers["/generate"] = (500, {"detail": "broken"})
    assert post(router, "s", {"input_ids": [1]}).status == 500
    assert len(engine.generated()) == 1


@needs_smg
def test_stop_leaves_no_process_and_calls_say_that_it_ended(router: Router):
    router.start()
    assert router.process.members()
    router.stop()
    assert router.process.members() == []
    with pytest.raises(EngineError, match=r"got no answer.*The router has exited with status"):
        router.workers()
    router.stop()


@needs_smg
def test_a_router_that_cannot_start_shows_its_log(router: Router, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles_rollout.engines.router.OPTIONS", ("--no-such-option",))
    with pytest.raises(EngineStartError, match=r"exited with status \d+[\s\S]*no-such-option"):
        router.start()


def test_a_router_of_another_version_is_not_started(router: Router, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    with pytest.raises(EngineVersionError, match=r"smg 0\.0\.1 is installed"):
        router.start()


@needs_smg
def test_the_engines_of_a_router_can_be_set_at_once(router: Router, fake_engine: Callable[[], Any]):
    first, second, third = fake_engine(), fake_engine(), fake_engine()
    router.start([first.url, second.url])
    second.close()
    router.set_workers([third.url, first.url])
    assert router.workers() == {first.url: True, third.url: True}
    router.set_workers([])
    assert router.workers() == {}


@needs_smg
def test_a_router_that_was_killed_starts_again_at_its_address(router: Router, fake_engine: Callable[[], Any]):
    engine = fake_engine()
    url = router.start([engine.url])
    for pid in router.process.members():
        os.kill(pid, signal.SIGKILL)
    router.process.wait(10)
    assert router.poll() is not None
    assert router.start([engine.url]) == url
    assert generate(router, "s") == engine.url
