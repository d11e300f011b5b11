"""One trainer rank on gloo, run as a script: goes through every scenario and writes what it saw as JSON.

usage: weightsync_rank.py RANK SIZE STORE OUT
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import miles_weightsync.push as push_module
import torch
import torch.distributed as dist
from die_with_parent import die_with_parent
from miles_weightsync import PushConfig, WeightSyncError
from miles_weightsync.collective import host_id
from miles_weightsync.push import Pusher
from weightsync_fakes import AShard, FakeEngine, shards, shm_names, weights

CONFIG = PushConfig(bucket_bytes=600, timeout_s=20)
Seen = dict[str, Any]


def attempt(pusher: Pusher, given: Any, version: int) -> Seen:
    """Push and say how it ended on this rank."""
    try:
        report = pusher.push(given, version=version)
    except WeightSyncError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "bytes": report.bytes, "ok": [engine.ok for engine in report.engines]}


def arrived(engine: FakeEngine, version: int) -> bool:
    expected = weights(version)
    return engine.version == str(version) and all(torch.equal(t, expected[n]) for n, t in engine.params.items())


def own_boxes(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    with Pusher(urls, config=CONFIG) as pusher:
        seen = [attempt(pusher, shards(weights(v), rank, size), v) for v in (1, 2)]
    return {"pushes": seen, "arrived": arrived(engine, 2)}


def ranks_of_another_host(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    push_module.host_id = lambda: f"host {rank}"
    try:
        return own_boxes(rank, size, engine, urls)
    finally:
        push_module.host_id = host_id


def folder(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    root = Path(sys.argv[4]).parent / "versions"
    config = PushConfig(way="disk", disk_dir=str(root), bucket_bytes=600, timeout_s=20)
    with Pusher(urls, config=config) as pusher:
        seen = [attempt(pusher, shards(weights(3), rank, size), 3)]
    return {"pushes": seen, "arrived": arrived(engine, 3)}


def engine_fails(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    with Pusher(urls, config=CONFIG) as pusher:
        engine.fail_at = len(engine.requests) + 6
        first = attempt(pusher, shards(weights(4), rank, size), 4)
        paused = engine.is_paused
        dist.barrier()
        second = attempt(pusher, shards(weights(5), rank, size), 5)
    return {"pushes": [first, second], "paused": paused, "arrived": arrived(engine, 5)}


def a_rank_fails(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    def broken() -> Iterator[AShard]:
        yield from list(shards(weights(6), rank, size))[:2]
        raise OSError("the optimizer state is gone")

    with Pusher(urls, config=CONFIG) as pusher:
        first = attempt(pusher, broken() if rank == 1 else shards(weights(6), rank, size), 6)
        paused = engine.is_paused
        dist.barrier()
        second = attempt(pusher, shards(weights(6), rank, size), 6)
    return {"pushes": [first, second], "paused": paused, "arrived": arrived(engine, 6)}


def boxes_overlap(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    box = ((0, 3),) if rank == 0 else ((2, 4),)
    shard = AShard("w", (4,), torch.float32, box, torch.zeros(box[0][1] - box[0][0]))
    with Pusher(urls, config=CONFIG) as pusher:
        return {"pushes": [attempt(pusher, [shard], 7)]}


def versions_differ(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    with Pusher(urls, config=CONFIG) as pusher:
        return {"pushes": [attempt(pusher, shards(weights(7), rank, size), 7 + rank)]}


def settings_differ(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    try:
        Pusher(urls, config=CONFIG if rank == 0 else PushConfig(way="staged", bucket_bytes=600, timeout_s=20))
    except WeightSyncError as error:
        return {"pushes": [{"error": type(error).__name__, "message": str(error)}]}
    return {"pushes": []}


def a_rank_dies(rank: int, size: int, engine: FakeEngine, urls: list[str]) -> Seen:
    def dying() -> Iterator[AShard]:
        os._exit(9)
        yield  # type: ignore[unreachable]

    with Pusher(urls, config=CONFIG) as pusher:
        return {"pushes": [attempt(pusher, dying() if rank == 1 else shards(weights(8), rank, size), 8)]}


SCENARIOS: list[Callable[[int, int, FakeEngine, list[str]], Seen]] = [
    own_boxes,
    ranks_of_another_host,
    folder,
    engine_fails,
    a_rank_fails,
    boxes_overlap,
    versions_differ,
    settings_differ,
    a_rank_dies,  # last: it takes the rank with it
]


def main(rank: int, size: int, store: str, out: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    engine = FakeEngine()
    told = [engine.url]
    dist.broadcast_object_list(told, src=0)
    seen: dict[str, Seen] = {}
    for scenario in SCENARIOS:
        seen[scenario.__name__] = scenario(rank, size, engine, told)
        seen[scenario.__name__]["mixed"] = engine.resumed_mixed
        seen[scenario.__name__]["left"] = shm_names()
        Path(out).write_text(json.dumps(seen))
    engine.stop()
    os._exit(0)  # the default group has lost a rank: a clean shutdown would wait for it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
