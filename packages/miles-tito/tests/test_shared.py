"""What every package of the workspace uses: HTTP, back-off, ports, locks, headers of safetensors files."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from miles_tito.errors import WireError
from miles_tito.shared.backoff import delay_s
from miles_tito.shared.http import Http, NoAnswer, call_once
from miles_tito.shared.locks import FileLock
from miles_tito.shared.ports import PortReservation, free_port, port_of
from miles_tito.shared.safetensors import pack_header, read_header, write_tensors


@pytest.fixture
async def seen() -> list[dict[str, str]]:
    return []


@pytest.fixture
async def url(seen: list[dict[str, str]]) -> AsyncIterator[str]:
    """A server that breaks the first two connections off, then answers with what it was sent."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        if request.path == "/breaks" and len(seen) < 3:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"got": await request.json() if request.can_read_body else None}, status=201)

    app = web.Application()
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def test_a_broken_call_is_sent_again_and_the_sendings_are_counted(url: str, seen: list[dict[str, str]]):
    async with Http(silence_s=5.0, headers={"X-Mine": "1"}) as http:
        answer = await http.call("POST", f"{url}/breaks", json={"a": 1}, retry_for_s=10.0, retry_header="X-Count")
    assert (answer.status, answer.is_ok, answer.json(), answer.resent) == (201, True, {"got": {"a": 1}}, 2)
    assert [headers.get("X-Count") for headers in seen] == [None, "1", "2"]
    assert {headers["X-Mine"] for headers in seen} == {"1"}


async def test_a_call_without_retries_says_what_broke(url: str):
    async with Http(silence_s=5.0) as http:
        with pytest.raises(NoAnswer, match=rf"GET {url}/breaks got no answer: ServerDisconnectedError") as caught:
            await http.call("GET", f"{url}/breaks")
    assert not caught.value.is_silence
    assert isinstance(caught.value, ConnectionError)


async def test_a_silent_server_is_not_asked_again():
    with PortReservation() as reservation:
        reservation._socket.listen()  # takes connections, and says nothing
        async with Http(silence_s=0.05) as http:
            with pytest.raises(NoAnswer) as caught:
                await http.call("GET", f"http://127.0.0.1:{reservation.port}/", retry_for_s=60.0)
    assert caught.value.is_silence
    assert caught.value.resent == 0


async def test_a_blocking_caller_inside_a_loop_is_told_of_a_refused_connection():
    port = free_port()
    with pytest.raises(NoAnswer, match=rf"GET http://127.0.0.1:{port}/health got no answer"):
        call_once("GET", f"http://127.0.0.1:{port}/health", timeout_s=5.0)


def test_a_blocking_caller_needs_no_loop():
    with pytest.raises(NoAnswer):
        call_once("GET", f"http://127.0.0.1:{free_port()}/health", timeout_s=5.0)


def test_waits_double_up_to_the_longest():
    assert [delay_s(n, first_s=0.5, longest_s=3.0) for n in (0, 1, 2, 3, 2000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_reserved_port_is_not_free_and_every_url_has_a_port():
    with PortReservation() as reservation:
        assert free_port() != reservation.port
    assert [port_of(url) for url in ("http://h:81/x", "http://h", "https://h/", "http://[::1]:5")] == [81, 80, 443, 5]


def _takes(path: Path, shared: bool) -> bool:
    try:
        FileLock(path, shared=shared)
    except BlockingIOError:
        return False
    return True


def test_a_lock_keeps_other_processes_out_until_it_is_released(tmp_path: Path):
    path = tmp_path / "lock"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with FileLock(path):
            assert not pool.apply(_takes, (path, True))
        with FileLock(path, shared=True):
            assert pool.apply(_takes, (path, True))
            assert not pool.apply(_takes, (path, False))
        assert pool.apply(_takes, (path, False))
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "absent", create=False)


def test_a_header_says_where_each_tensor_lies(tmp_path: Path):
    file = tmp_path / "x.safetensors"
    small, wide = np.arange(3, dtype=np.int8), np.arange(6, dtype=np.float64).reshape(2, 3)
    content = write_tensors({"small": small, "wide": wide}, {"who": "me"})
    file.write_bytes(content)
    header = read_header(file)
    assert header.metadata == {"who": "me"}
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == {
        "small": ("I8", (3,)),
        "wide": ("F64", (2, 3)),
    }
    assert content[header.tensors["wide"].start : header.tensors["wide"].end] == wide.tobytes()
    assert header.data_start == header.tensors["wide"].start
    assert content[: header.data_start] == pack_header(
        [("wide", "F64", (2, 3), 48), ("small", "I8", (3,), 3)], {"who": "me"}
    )


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path, content: bytes):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(WireError, match=r"x\.safetensors: "):
        read_header(file)
