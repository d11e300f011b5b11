"""`miles-tito serve` as a process: killed, brought back at its address, and told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from miles_tito import Tokenizer
from miles_tito.cli import main
from small_tokenizer import write_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Engine:
    """Answers `/generate` with one word; from `hold_from` on, only when `go` is set."""

    def __init__(self, tokenizer: Tokenizer, *, hold_from: int) -> None:
        self.rids: list[str] = []
        self.aborted = asyncio.Event()
        self.held = asyncio.Event()
        self.go = asyncio.Event()
        self._ids = [*tokenizer.encode("word").tolist(), tokenizer.eos_ids[0]]
        self._hold_from = hold_from
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.rids.append(body["rid"])
        if len(self.rids) > self._hold_from:
            self.held.set()
            await self.go.wait()
        rows = [[-0.5, token, None] for token in self._ids]
        meta: dict[str, Any] = {"completion_tokens": len(rows), "weight_version": "2", "output_token_logprobs": rows}
        meta |= {"finish_reason": {"type": "stop", "matched": self._ids[-1]}}
        return JSONResponse({"output_ids": self._ids, "meta_info": meta})

    async def _abort(self, request: Request) -> Response:
        if (await request.json())["rid"] == self.rids[-1]:
            self.aborted.set()
        return Response()


class Server:
    """The process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stderr
        self._stderr = process.stderr

    async def end(self, how: signal.Signals) -> str:
        """Send `how`; what it had logged by its end."""
        self.process.send_signal(how)
        text = (await self._stderr.read()).decode()
        await self.process.wait()
        return text


@contextlib.asynccontextmanager
async def serving(engine: str, folder: Path, port: int, *, grace_s: int = 20) -> AsyncIterator[Server]:
    command = ["serve", "--engine", engine, "--tokenizer", str(folder / "tokenizer"), "--max-context", "4000"]
    command += ["--port", str(port), "--state-dir", str(folder / "state"), "--grace-s", str(grace_s)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "miles_tito", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        line = await process.stdout.readline()
        assert b"serving" in line, (await process.stderr.read()).decode() if process.stderr else line
        yield Server(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Client:
    def __init__(self, http: httpx.AsyncClient, port: int) -> None:
        self.http = http
        self.server = f"http://127.0.0.1:{port}"
        self.auth: dict[str, str] = {}
        self.messages: list[dict[str, Any]] = []

    async def open(self) -> None:
        opened = (await self.http.post(f"{self.server}/sessions", json={"session_id": "s"})).json()
        self.auth = {"Authorization": f"Bearer {opened['api_key']}"}

    async def say(self, text: str) -> None:
        """One turn; the conversation grows only when it is answered."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = await self.http.post(
            f"{self.server}/v1/chat/completions", json={"messages": messages}, headers=self.auth
        )
        assert answer.status_code == 200, answer.text
        self.messages = [*messages, answer.json()["choices"][0]["message"]]

    async def tree(self) -> dict[str, Any]:
        return (await self.http.get(f"{self.server}/sessions/s", headers=self.auth)).json()


async def test_a_killed_server_comes_back_with_its_sessions_and_the_lost_turn_is_sampled_once_more(
    tokenizer: Tokenizer, served: Any, tmp_path: Path, port: int
):
    write_tokenizer(tmp_path / "tokenizer")
    engine = Engine(tokenizer, hold_from=2)
    async with served(engine.app) as url, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        client = Client(http, port)
        async with serving(url, tmp_path, port) as server:
            await client.open()
            await client.say("a")
            await client.say("b")
            before = await client.tree()
            lost = asyncio.create_task(client.say("c"))
            await engine.held.wait()
            await server.end(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
        engine.go.set()
        async with serving(url, tmp_path, port) as server:
            await engine.aborted.wait()
            assert (await client.tree())["nodes"] == before["nodes"]
            await client.say("c")
            after = await client.tree()
            log = await server.end(signal.SIGTERM)
    assert (after["num_turns"], after["num_discarded"]) == (3, 1)
    assert [node["kind"] for node in after["nodes"]] == ["root", "turn", "turn"]
    assert after["nodes"][:2] == before["nodes"]
    assert len(engine.rids) == len(set(engine.rids)) == 4
    assert "1 turns were under way when the last server ended" in log


async def test_a_server_told_to_stop_lets_turns_under_way_finish_and_says_so(
    tokenizer: Tokenizer, served: Any, tmp_path: Path, port: int
):
    write_tokenizer(tmp_path / "tokenizer")
    engine = Engine(tokenizer, hold_from=0)
    async with served(engine.app) as url, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        client = Client(http, port)
        async with serving(url, tmp_path, port) as server:
            await client.open()
            last = asyncio.create_task(client.say("a"))
            await engine.held.wait()
            end = asyncio.create_task(server.end(signal.SIGTERM))
            while True:  # until it takes no one in any more
                try:
                    await http.get(f"{client.server}/health", headers={"connection": "close"})
                except httpx.TransportError:
                    break
            engine.go.set()
            await last
            log = await end
    assert server.process.returncode == -signal.SIGTERM
    assert "Shut down with 1 turns under way: 1 finished, 0 aborted." in log
    assert client.messages[-1]["content"] == "word"


async def test_a_server_told_to_stop_aborts_what_takes_too_long_and_names_it(
    tokenizer: Tokenizer, served: Any, tmp_path: Path, port: int
):
    write_tokenizer(tmp_path / "tokenizer")
    engine = Engine(tokenizer, hold_from=0)
    async with served(engine.app) as url, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        client = Client(http, port)
        async with serving(url, tmp_path, port, grace_s=1) as server:
            await client.open()
            last = asyncio.create_task(client.say("a"))
            await engine.held.wait()
            log = await server.end(signal.SIGTERM)
            with pytest.raises((httpx.TransportError, AssertionError)):
                await last
        await engine.aborted.wait()
        engine.go.set()
    assert f"Shut down with 1 turns under way: 0 finished, 1 aborted ({engine.rids[0]})." in log


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("serve", "--engine", "somewhere"), "no URL"),
        (("serve", "--engine", "http://x", "--port", "70000"), "from 0 to 65535"),
        (("serve", "--engine", "http://x", "--max-context", "-5"), "at least 1"),
        (("serve", "--engine", "http://x", "--grace-s", "soon"), "seconds"),
        (("verify", "--conversations", "-3"), "at least 0"),
    ],
)
def test_a_flag_that_says_nothing_sensible_is_refused(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([*words, "--tokenizer", "nowhere"])
    assert why in capsys.readouterr().err
