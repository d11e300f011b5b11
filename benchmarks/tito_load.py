"""One session server under load for a long time: errors, memory, latency; then under attack.

    python benchmarks/tito_load.py                            256 sessions of 20 turns, over and over, for ten minutes
    python benchmarks/tito_load.py --minutes 1 --attacks 10000

The engine answers at once, so the server is never idle. A session is opened, plays its turns, hands out its samples and
is closed; then the next one begins. Memory is the server's resident set each second; it is flat when the last third of
the run holds no more than a tenth more than the middle one. Attacks are hostile requests of the tests' generator.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from miles_tito import load_tokenizer
from tito import SHARED, Client, open_session, running
from tito_joins import REPLY_TOKENS, WORDS, unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "miles-tito" / "tests"))

from hostile import attacks


@dataclass(kw_only=True)
class Load:
    """What happened."""

    turn_s: list[float] = field(default_factory=list[float])
    rss_mb: list[float] = field(default_factory=list[float])
    num_sessions: int = 0
    errors: list[str] = field(default_factory=list[str])


async def play(server: str, http: aiohttp.ClientSession, load: Load, *, turns: int, until: float) -> None:
    """Sessions one after the other."""
    while time.monotonic() < until:
        try:
            client = Client(http, await open_session(server, http), WORDS * 8)
            for _ in range(turns):
                load.turn_s.append(await client.turn())
            async with http.post(f"{client.base}/samples", json={"reward": 1.0}, headers=client.auth) as response:
                answer = await response.json()
                [sample] = answer["samples"]
                assert sum(sample["loss_mask"]) == turns * REPLY_TOKENS, sample["metadata"]
            async with http.delete(client.base, headers=client.auth) as response:
                assert response.status == 204, await response.text()
            load.num_sessions += 1
        except (aiohttp.ClientError, AssertionError, KeyError, ValueError) as error:
            load.errors.append(f"{type(error).__name__}: {error}"[:300])


async def watch(server: str, http: aiohttp.ClientSession, load: Load) -> None:
    async with http.get(f"{server}/health") as response:
        pid = (await response.json())["pid"]
    while True:
        load.rss_mb.append(resident_mb(pid))
        await asyncio.sleep(1)


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def attack(server: str, http: aiohttp.ClientSession, count: int) -> dict[str, Any]:
    """How `count` hostile requests were answered."""
    opened = await open_session(server, http)
    victim = await open_session(server, http)
    secret = "what only the owner said"
    owner = Client(http, victim, secret)
    await owner.turn()
    half = count // 2
    foreign = itertools.islice(attacks(2, session=victim["session_id"], keys=[opened["api_key"]]), half)
    own = itertools.islice(attacks(3, session=opened["session_id"], keys=[opened["api_key"]]), count - half)
    statuses: dict[int, int] = {}
    leaks = broken = 0
    for one in itertools.chain(foreign, own):
        try:
            headers = {name: value.replace("\r", "").replace("\n", "") for name, value in one.headers.items()}
            async with http.request(one.method, f"{server}{one.path}", data=one.body, headers=headers) as response:
                text = await response.read()
                statuses[response.status] = statuses.get(response.status, 0) + 1
                leaks += secret.encode() in text
        except (aiohttp.ClientError, ValueError):
            broken += 1  # what no HTTP client can send
    await owner.turn()
    return {"statuses": dict(sorted(statuses.items())), "leaks": leaks, "not sent": broken}


async def run(args: argparse.Namespace, folder: Path) -> int:
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer.encode("ok " * REPLY_TOKENS)[: REPLY_TOKENS - 1].tolist(), tokenizer.eos_ids[0]]
    load = Load()
    command = ["-m", "miles_tito", "serve", "--tokenizer", str(folder), "--family", args.family, "--port", "0"]
    command += ["--max-context", "1000000", "--state-dir", str(folder.parent / "state")]
    engine_script = str(Path(__file__).with_name("tito.py"))
    async with (
        running(engine_script, "--engine-ids", json.dumps(ids)) as engine,
        running(*command, "--engine", engine) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=args.sessions + 8)) as http,
    ):
        watcher = asyncio.create_task(watch(server, http, load))
        began = time.monotonic()
        until = began + 60 * args.minutes
        await asyncio.gather(*(play(server, http, load, turns=args.turns, until=until) for _ in range(args.sessions)))
        seconds = time.monotonic() - began
        third = max(1, len(load.rss_mb) // 3)
        middle, last = np.median(load.rss_mb[third:-third] or load.rss_mb), np.median(load.rss_mb[-third:])
        print(f"{load.num_sessions} sessions, {len(load.turn_s)} turns, {len(load.turn_s) / seconds:.0f} turns/s")
        p50, p99 = (np.percentile(load.turn_s, q) * 1000 for q in (50, 99))
        print(f"turn p50 {p50:.1f} ms, p99 {p99:.1f} ms with {args.sessions} at once")
        is_flat = bool(last <= 1.1 * middle)
        print(f"memory {middle:.0f} MB, then {last:.0f} MB: {'flat' if is_flat else 'GROWING'}")
        print(f"errors: {len(load.errors)} {load.errors[:3] or ''}")
        attacked = await attack(server, http, args.attacks) if args.attacks else {"statuses": {}, "leaks": 0}
        if args.attacks:
            print(f"attacks: {attacked}")
        watcher.cancel()
    crashed = any(status >= 500 for status in attacked["statuses"])
    return int(bool(load.errors) or not is_flat or crashed or bool(attacked["leaks"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--sessions", type=int, default=256, help="at once")
    parser.add_argument("--turns", type=int, default=20, help="a session")
    parser.add_argument("--attacks", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; default: Qwen3 of ../shared")
    parser.add_argument("--family", default="qwen3")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.tokenizer
        if folder is None:
            if not SHARED.exists():
                parser.error(f"{SHARED} is not there; give --tokenizer FOLDER")
            folder = unpack(SHARED, name)
        return asyncio.run(run(args, folder))


if __name__ == "__main__":
    sys.exit(main())
