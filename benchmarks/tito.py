"""What the session server costs: time added to a turn, turns a second, collection, memory, joins against other ways.

    python benchmarks/tito.py                       about two minutes, with the tokenizer of ../shared
    python benchmarks/tito.py --tokenizer FOLDER    with yours
    python benchmarks/tito.py --json                the same numbers as JSON

Three processes, as in a run: an engine that answers at once with 16 tokens, `miles-tito serve`, and this client. A turn
sends the whole history as an agent does, and the next user message. `direct` is the same prompt, already encoded,
posted to the engine; what the server adds is the difference of the medians (p50) and of the 99th percentiles. Turns a
second count wall time, and the server's own CPU time, which other work on the machine does not change.

Targets: at most 3 ms added at 32k tokens and 8 ms at 128k, 500 turns a second at 1k, 50 ms to collect 200 turns of
117k tokens, 16 bytes held a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from miles_tito import Tokenizer, load_tokenizer
from miles_tito.records.encoding import decode_samples
from tito_joins import REPLY_TOKENS, WORDS, Row, rows_of_joins, unpack

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers" / "qwen3.tar.xz"
CONTEXTS = {"1k": 1024, "8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}
TARGET_ADDED_MS = {"32k": 3.0, "128k": 8.0}


class Client:
    """One agent's conversation."""

    def __init__(self, http: aiohttp.ClientSession, opened: dict[str, Any], context: str) -> None:
        self._http = http
        self._url = f"{opened['base_url']}/chat/completions"
        self.base = opened["base_url"].removesuffix("/v1")
        self.auth = {"Authorization": f"Bearer {opened['api_key']}"}
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": context}]

    async def turn(self, text: str = "And the next one?") -> float:
        """One turn; its seconds, the client's own encoding of the request left out."""
        body = json.dumps({"messages": self.messages}).encode()
        began = time.perf_counter()
        async with self._http.post(self._url, data=body, headers=self.auth) as response:
            answer = await response.read()
        seconds = time.perf_counter() - began
        assert response.status == 200, answer[:500]
        self.messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": text}]
        return seconds


async def rows_of_latency(server: str, engine: str, http: aiohttp.ClientSession, tok: Tokenizer) -> list[Row]:
    rows: list[Row] = []
    pid = await pid_of(server, http)
    for name, size in CONTEXTS.items():
        client = Client(http, await open_session(server, http), text_of(tok, size))
        turns = 30 if size > 10_000 else 100
        await client.turn()
        cpu = cpu_seconds(pid)
        through = [await client.turn() for _ in range(turns)]
        cpu = (cpu_seconds(pid) - cpu) / turns * 1000
        body = json.dumps({"rid": "x", "input_ids": [1234] * size, "sampling_params": {}}).encode()
        direct: list[float] = []
        for _ in range(turns):
            began = time.perf_counter()
            async with http.post(f"{engine}/generate", data=body) as response:
                await response.read()
            direct.append(time.perf_counter() - began)
        rows.append(Row(what=f"server's CPU for a turn at {name}", value=cpu, unit="ms"))
        for quantile in (50, 99):
            added = (float(np.percentile(through, quantile)) - float(np.percentile(direct, quantile))) * 1000
            limit = TARGET_ADDED_MS.get(name) if quantile == 50 else None
            rows.append(
                Row(
                    what=f"added at {name}, p{quantile}",
                    value=added,
                    unit="ms",
                    target=f"<= {limit:g}" if limit else "",
                    met=added <= limit if limit else None,
                )
            )
    return rows


async def rows_of_throughput(server: str, http: aiohttp.ClientSession, tok: Tokenizer) -> list[Row]:
    rows: list[Row] = []
    pid = await pid_of(server, http)
    for count in (1, 8, 64):
        context = text_of(tok, 700)
        turns = max(16, 256 // count // 16 * 16)

        async def play(turns: int, context: str = context) -> None:
            for _ in range(turns // 16):  # a session keeps to about 1k tokens
                client = Client(http, await open_session(server, http), context)
                for _ in range(16):
                    await client.turn()

        await asyncio.gather(*(play(16) for _ in range(count)))
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        await asyncio.gather(*(play(turns) for _ in range(count)))
        rate = count * turns / (time.perf_counter() - began)
        rows.append(Row(what=f"{count} sessions at 1k", value=rate, unit="turns/s"))
        rate = count * turns / (cpu_seconds(pid) - cpu)
        what = f"{count} sessions at 1k, by the server's CPU"
        rows.append(Row(what=what, value=rate, unit="turns/s", target=">= 500", met=rate >= 500))
    return rows


async def rows_of_collection(server: str, http: aiohttp.ClientSession, tok: Tokenizer) -> list[Row]:
    """200 turns of 117k tokens; meanwhile somebody else asks for the server's health."""
    client = Client(http, await open_session(server, http), text_of(tok, 540))
    text = text_of(tok, 550)
    for _ in range(200):
        await client.turn(text)
    waits: list[float] = []

    async def others() -> None:
        while True:
            began = time.perf_counter()
            async with http.get(f"{server}/health") as response:
                await response.read()
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.001)

    watcher = asyncio.create_task(others())
    times: list[float] = []
    samples: list[Any] = []
    for _ in range(5):
        began = time.perf_counter()
        headers = {**client.auth, "accept": "application/msgpack"}
        async with http.post(f"{client.base}/samples", json={"reward": 1.0}, headers=headers) as response:
            packed = await response.read()
        times.append(time.perf_counter() - began)
        samples, _ = decode_samples(packed)
    watcher.cancel()
    best = statistics.median(times) * 1000
    what = f"samples of {len(client.messages) // 2} turns, {len(samples[0].tokens) // 1000}k tokens"
    return [
        Row(what=what, value=best, unit="ms", target="<= 50", met=best <= 50),
        Row(what="longest wait of others meanwhile", value=max(waits) * 1000, unit="ms"),
    ]


async def open_session(server: str, http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.post(f"{server}/sessions", json={}) as response:
        return await response.json()


async def pid_of(server: str, http: aiohttp.ClientSession) -> int:
    async with http.get(f"{server}/health") as response:
        return (await response.json())["pid"]


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def text_of(tokenizer: Tokenizer, size: int) -> str:
    """Plain text of about `size` tokens."""
    return WORDS * max(1, size // len(tokenizer.encode(WORDS)))


async def serve_instantly(ids: list[int]) -> None:
    """An engine that reads a request to its end and answers at once, whatever it says."""
    rows = [[-0.5, token, None] for token in ids]
    meta = {"completion_tokens": len(ids), "weight_version": "1", "output_token_logprobs": rows}
    answer = {"output_ids": ids, "meta_info": {**meta, "finish_reason": {"type": "stop", "matched": ids[-1]}}}
    body = json.dumps(answer).encode()
    events = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    whole = head % (b"application/json", len(body)) + body
    streamed = head % (b"text/event-stream", len(events)) + events

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                asked = await reader.readexactly(int(found[1]) if found else 0)
                writer.write(streamed if b'"stream":true' in asked else whole)
                await writer.drain()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**24)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[str]:
    """A process of ours, until the block ends; the URL that it prints first."""
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://[^\s,]+", line)
        assert found, f"{command} printed no URL but {line!r}"
        yield found[0]
    finally:
        process.terminate()
        await process.wait()


async def measure(folder: Path, family: str) -> list[Row]:
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer.encode("ok " * REPLY_TOKENS)[: REPLY_TOKENS - 1].tolist(), tokenizer.eos_ids[0]]
    rows = list(rows_of_joins(folder, family))
    limits = ["--max-context", "1000000", "--max-tokens", "512", "--port", "0", "--family", family]
    async with (
        running(__file__, "--engine-ids", json.dumps(ids)) as engine,
        running("-m", "miles_tito", "serve", "--engine", engine, "--tokenizer", str(folder), *limits) as server,
        aiohttp.ClientSession() as http,
    ):
        rows += await rows_of_latency(server, engine, http, tokenizer)
        rows += await rows_of_throughput(server, http, tokenizer)
        rows += await rows_of_collection(server, http, tokenizer)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; default: Qwen3 of ../shared")
    parser.add_argument("--family", default="qwen3")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine-ids", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_ids:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_instantly(json.loads(args.engine_ids)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = args.tokenizer
        if folder is None:
            if not SHARED.exists():
                parser.error(f"{SHARED} is not there; give --tokenizer FOLDER")
            folder = unpack(SHARED, name)
        rows = asyncio.run(measure(folder, args.family))
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    width = max(len(row.what) for row in rows)
    for row in rows:
        verdict = "" if row.met is None else "met" if row.met else "MISSED"
        print(f"{row.what:<{width}}  {row.value:>9.2f} {row.unit:<12} {row.target:>7} {verdict}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
