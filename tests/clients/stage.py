"""Runs inside a network namespace of its own: engine, session server and agent on loopback, nothing else in reach.

    python stage.py '{"play": "claude", "agent": "claude", "clients": "FOLDER", "more": [], …}'

Prints one JSON object: how the agent ended, the session's tree, its samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import re
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import httpx
from miles_tito import load_tokenizer
from miles_tito.server import serve
from plays import PLAYS
from small_tokenizer import write_tokenizer
from text_engine import engine_app

TIMEOUT_S = 60


def raise_loopback() -> None:
    """`ip link set lo up`, on machines without `ip`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running


async def main(asked: dict[str, Any]) -> dict[str, Any]:
    raise_loopback()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder / "tokenizer")
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(engine_at(tokenizer, asked))
            server = await stack.enter_async_context(server_at(engine, tokenizer, folder))
            http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
            opened = (await http.post(f"{server}/sessions", json={})).json()
            make = getattr(agents, asked["agent"])
            clients = Path(asked["clients"])
            agent = make(clients, opened["base_url"], opened["api_key"], *asked["more"], **asked["options"])
            runs = await play(agent, folder)
            auth = {"Authorization": f"Bearer {opened['api_key']}"}
            base = f"{server}/sessions/{opened['session_id']}"
            tree = (await http.get(base, headers=auth)).json()
            samples = (await http.post(f"{base}/samples", json={"reward": 1.0}, headers=auth)).json()
        made = folder / "work" / "hello.txt"
        return {
            "runs": runs,
            "file": made.read_text() if made.exists() else None,
            "nodes": tree["nodes"],
            "num_discarded": tree["num_discarded"],
            "samples": [
                {
                    "id": sample["id"],
                    "kind": sample["metadata"]["kind"],
                    "text": load_tokenizer(tokenizer).decode(
                        [t for t, m in zip(sample["tokens"], sample["loss_mask"], strict=True) if m]
                    ),
                    "loss_tokens": sum(sample["loss_mask"]),
                    "loss_denominator": sample["loss_denominator"],
                }
                for sample in samples["samples"]
            ],
            "dropped": samples["dropped"],
        }


@contextlib.asynccontextmanager
async def engine_at(tokenizer: Path, asked: dict[str, Any]) -> AsyncIterator[str]:
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    app = engine_app(load_tokenizer(tokenizer), PLAYS[asked["play"]], fail_at=asked["fail_at"])
    task = asyncio.create_task(serve(app, ready=url.set_result))
    try:
        yield await url
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def server_at(engine: str, tokenizer: Path, folder: Path) -> AsyncIterator[str]:
    """`miles-tito serve` as its users start it."""
    command = [sys.executable, "-m", "miles_tito", "serve", "--engine", engine, "--tokenizer", str(tokenizer)]
    command += ["--port", "0", "--max-context", "1000000", "--max-tokens", "4096", "--state-dir", str(folder / "state")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)).decode()
        found = re.search(r"http://\S+", line)
        assert found, f"the server did not start: {line!r}"
        yield found[0]
    finally:
        process.terminate()
        await process.wait()


async def play(agent: agents.Agent, folder: Path) -> list[dict[str, Any]]:
    """Run the agent's commands; how each ended."""
    home, work = folder / "home", folder / "work"
    for root, files in ((home, agent.home), (work, agent.work)):
        root.mkdir()
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    runs: list[dict[str, Any]] = []
    for command in agent.commands:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=work,
            env={**agents.plain_environment(home), **agent.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
        texts = {"out": out.decode(errors="replace")[-3000:], "err": err.decode(errors="replace")[-1500:]}
        runs.append({"status": process.returncode, **texts})
    return runs


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))
