"""The life of a server, on a stand-in that answers like SGLang, dies, or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from miles_rollout.engines import (
    AttachedServer,
    EngineConfig,
    EngineDied,
    EngineServer,
    EngineStartError,
    EngineVersionError,
    StartProgress,
)
from miles_rollout.engines import server as server_module
from miles_tito.shared.http import Http, NoAnswer, call_once
from miles_tito.shared.ports import port_of

STAND_IN = textwrap.dedent("""
    import http.server, os, sys, time
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    print("loading", flush=True)
    if behaviour == "dies":
        print("first line\\n\\nRuntimeError: CUDA out of memory", flush=True)
        sys.exit(7)
    if behaviour == "hangs":
        time.sleep(600)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            if self.path == "/die":
                os._exit(9)
        def log_message(self, *args):
            pass
    try:
        server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        sys.exit(f"error while attempting to bind on address: {error}")
    server.serve_forever()
""")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineServer]]:
    """Build servers whose command is the stand-in, with one behaviour for each launch (the last one repeats)."""
    servers: list[EngineServer] = []
    monkeypatch.setattr(server_module, "check_sglang", lambda device: "fine")

    def make(*behaviours: str, **config: Any) -> EngineServer:
        launches: list[int] = []

        def command(config: EngineConfig, *, port: int, **_: Any) -> list[str]:
            launches.append(port)
            behaviour = behaviours[min(len(launches), len(behaviours)) - 1]
            return [sys.executable, "-c", STAND_IN, str(TAKEN.get(behaviour, port)), behaviour]

        monkeypatch.setattr(server_module, "server_command", command)
        server = EngineServer(EngineConfig(device="cpu", **config), model_path="m", log_path=tmp_path / "engine.log")
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


TAKEN: dict[str, int] = {}
"""Behaviour to a port that the stand-in is to listen on instead of its own."""


def test_a_server_is_ready_when_it_answers_and_gone_after_stop(make: Callable[..., EngineServer]):
    server = make("serves")
    server.start()
    url = server.wait_ready()
    assert call_once("GET", f"{url}/model_info", timeout_s=5.0).is_ok
    assert server.poll() is None
    members = server.process.members()
    server.stop()
    assert server.poll() == 128 + signal.SIGKILL
    assert server.process.members() == []
    assert members
    server.stop()


def test_a_server_that_dies_while_starting_shows_its_last_lines_and_what_to_do(make: Callable[..., EngineServer]):
    server = make("dies")
    server.start()
    with pytest.raises(EngineStartError) as caught:
        server.wait_ready()
    message = str(caught.value)
    assert "exited with status 7" in message
    assert "loading\nfirst line\nRuntimeError: CUDA out of memory" in message
    assert "Less memory: lower `max_total_tokens`" in message
    assert str(server.log_path) in message


def test_a_server_that_hangs_is_given_up_and_killed(make: Callable[..., EngineServer]):
    server = make("hangs", start_timeout_s=0.6)
    server.start()
    with pytest.raises(EngineStartError, match=r"did not come up in 1 s \(`start_timeout_s`\)"):
        server.wait_ready()
    assert server.poll() is not None


def test_stop_from_another_thread_ends_the_wait(make: Callable[..., EngineServer]):
    server = make("hangs")
    server.start()
    stopper = threading.Timer(0.3, server.stop)
    stopper.start()
    with pytest.raises(EngineStartError, match="was stopped"):
        server.wait_ready()
    stopper.join()
    assert server.poll() is not None


def test_progress_tells_the_seconds_and_the_last_line(
    make: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "PROGRESS_S", 0.0)
    server = make("hangs", start_timeout_s=60.0)
    server.start()
    seen: list[StartProgress] = []

    def stop_when_loading(progress: StartProgress) -> None:
        seen.append(progress)
        if progress.last_line == "loading":
            server.stop()

    with pytest.raises(EngineStartError):
        server.wait_ready(stop_when_loading)
    assert seen[-1].last_line == "loading"
    assert 0 < seen[-1].seconds < 60


def test_a_port_that_is_taken_meanwhile_is_replaced_by_another(
    make: Callable[..., EngineServer], fake_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TAKEN, "collides", port_of(fake_engine().url))
    server = make("collides", "serves")
    server.start()
    before = server.url
    assert server.wait_ready() != before
    assert "error while attempting to bind" in server.log_path.read_text()


def test_ports_that_stay_taken_are_an_error(
    make: Callable[..., EngineServer], fake_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TAKEN, "collides", port_of(fake_engine().url))
    server = make("collides")
    server.start()
    with pytest.raises(EngineStartError, match="error while attempting to bind"):
        server.wait_ready()


def test_a_stranger_that_answers_on_the_port_is_not_taken_for_the_server(
    make: Callable[..., EngineServer], fake_engine: Callable[[], Any]
):
    stranger = fake_engine()
    server = make("hangs", start_timeout_s=1.0)
    server.start()
    assert server._reservation is not None
    server._reservation.close()
    server._reservation.port = port_of(stranger.url)
    with pytest.raises(EngineStartError, match="did not come up"):
        server.wait_ready()
    assert ("GET", "/ready", {}) in stranger.calls


async def test_watch_raises_when_the_server_exits_by_itself(make: Callable[..., EngineServer]):
    server = make("serves")
    server.start()
    url = await asyncio.to_thread(server.wait_ready)
    watching = asyncio.create_task(server.watch(interval_s=0.01))
    async with Http(silence_s=5.0) as http:
        with contextlib.suppress(NoAnswer):
            await http.call("GET", f"{url}/die")
    with pytest.raises(EngineDied, match=r"exited with status 9[\s\S]*loading"):
        await watching


async def test_watch_returns_when_the_server_is_stopped(make: Callable[..., EngineServer]):
    server = make("serves")
    server.start()
    watching = asyncio.create_task(server.watch(interval_s=0.01))
    await asyncio.to_thread(server.stop)
    await watching


def test_nothing_starts_without_a_supported_sglang(make: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch):
    def refuse(device: str) -> str:
        raise EngineVersionError("no")

    server = make("serves")
    monkeypatch.setattr(server_module, "check_sglang", refuse)
    with pytest.raises(EngineVersionError):
        server.start()
    with pytest.raises(EngineStartError, match=r"call start\(\) first"):
        _ = server.url
    server.stop()


def test_a_running_server_is_not_started_twice(make: Callable[..., EngineServer]):
    server = make("serves")
    server.start()
    with pytest.raises(EngineStartError, match="already runs"):
        server.start()


def test_an_external_server_is_checked_and_left_running(fake_engine: Callable[[], Any]):
    external = fake_engine()
    server = AttachedServer(external.url + "/")
    server.start()
    assert server.wait_ready() == external.url
    server.stop()
    assert call_once("GET", f"{external.url}/model_info", timeout_s=5.0).is_ok


def test_an_external_server_of_another_version_is_refused(fake_engine: Callable[[], Any]):
    external = fake_engine()
    external.answers["/server_info"] = (200, {"version": "0.4.0"})
    with pytest.raises(EngineVersionError, match=r"0\.4\.0.*0\.5\.23"):
        AttachedServer(external.url).wait_ready()


def test_an_address_where_nothing_listens_is_an_error():
    with pytest.raises(EngineStartError, match=r"answers at http://127\.0\.0\.1:1 .*ClientConnectorError"):
        AttachedServer("http://127.0.0.1:1", start_timeout_s=0.2).wait_ready()


def test_the_wait_for_an_external_server_can_be_stopped():
    server = AttachedServer("http://127.0.0.1:1")
    with pytest.raises(EngineStartError, match="was stopped"):
        server.wait_ready(lambda progress: server.stop())


def test_a_refused_key_is_an_error_with_the_answer(fake_engine: Callable[[], Any]):
    external = fake_engine()
    external.answers["/server_info"] = (401, {"error": "Unauthorized"})
    with pytest.raises(EngineStartError, match=r"answered 401: .*Unauthorized.*API key"):
        AttachedServer(external.url, api_key="x").wait_ready()


async def test_watch_notices_that_an_external_server_went(fake_engine: Callable[[], Any]):
    external = fake_engine()
    server = AttachedServer(external.url)
    watching = asyncio.create_task(server.watch(interval_s=0.01))
    external.close()
    with pytest.raises(EngineDied, match="has not answered 3 probes in a row"):
        await watching


def test_a_server_that_was_killed_starts_again_at_its_address(make: Callable[..., EngineServer]):
    server = make("serves")
    server.start()
    url = server.wait_ready()
    for pid in server.process.members():
        os.kill(pid, signal.SIGKILL)
    server.process.wait(10)
    server.start()
    assert server.wait_ready() == url
    assert call_once("GET", f"{url}/model_info", timeout_s=5.0).is_ok


def test_a_server_starts_at_the_port_that_another_one_had(make: Callable[..., EngineServer]):
    first = make("serves")
    first.start()
    url = first.wait_ready()
    first.stop()
    port = int(url.rpartition(":")[2])
    with EngineServer(first.config, model_path="m", log_path=first.log_path, port=port) as second:
        assert second.url == url


def test_a_server_is_ready_within_its_with_statement_and_gone_after_it(make: Callable[..., EngineServer]):
    with make("serves") as server:
        members = server.process.members()
        assert members
        assert call_once("GET", f"{server.url}/model_info", timeout_s=5.0).is_ok
    assert server.process.members() == []
    failing = make("dies")
    with pytest.raises(EngineStartError, match="exited with status 7"):
        failing.__enter__()
    assert failing.process.members() == []
