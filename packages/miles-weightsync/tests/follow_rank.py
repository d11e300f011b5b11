"""One trainer rank that pushes into a store, run as a script; writes how each push ended as JSON.

usage: follow_rank.py RANK SIZE RENDEZVOUS OUT STORE ENGINE…
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from die_with_parent import die_with_parent
from follow_model import trained
from miles_weightsync import PushConfig, WeightSyncError
from miles_weightsync.delta.files import Files
from miles_weightsync.push import Pusher
from weightsync_fakes import AShard, shards

Seen = dict[str, Any]


@contextmanager
def room_for(parts: int) -> Iterator[None]:
    """A disk on which so many more files can be written."""
    left, write = [parts], Files._write_and_rename

    def limited(self: Files, whole: str, *more: Any) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        write(self, whole, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "_write_and_rename", limited)
        yield


class Rank:
    """Pushes, and keeps what came of it."""

    def __init__(self, rank: int, size: int, store: str, engines: list[str]) -> None:
        self.rank, self.size, self.engines = rank, size, engines
        self.config = PushConfig(way="store", store=store, timeout_s=30)
        self.seen: dict[str, Seen] = {}

    def new(self) -> Pusher:
        return Pusher(self.engines, config=self.config)

    def push(self, pusher: Pusher, version: int, *, as_: str = "", given: Any = None, of: int = 0) -> None:
        """`of`: the version whose weights they are, where it is another one."""
        dist.barrier()
        try:
            report = pusher.push(given or shards(trained(of or version), self.rank, self.size), version=version)
        except WeightSyncError as error:
            seen: Seen = {"error": type(error).__name__, "message": str(error)}
        else:
            (first, *_) = report.engines
            ok = [engine.ok for engine in report.engines]
            seen = {"error": None, "bytes": report.bytes, "kind": first.kind, "reason": first.reason, "ok": ok}
        self.seen[as_ or str(version)] = seen

    def broken(self, version: int) -> Iterator[AShard]:
        yield from list(shards(trained(version), self.rank, self.size))[:2]
        raise OSError("the optimizer state is gone")

    def run(self) -> None:
        with self.new() as pusher:
            for version in (1, 2, 3):
                self.push(pusher, version)
            given = self.broken(4) if self.rank == 1 else None
            self.push(pusher, 4, as_="4: a rank fails", given=given)
            with room_for(3 if self.rank == 1 else 100):
                self.push(pusher, 4, as_="4: the disk is full")
            self.push(pusher, 4)
            self.push(pusher, 3, as_="back to 3")
            self.push(pusher, 4, as_="4 again")
            self.push(pusher, 4, as_="4 with other weights", of=5)
        with self.new() as pusher:  # the trainer was started again
            self.push(pusher, 3, as_="3 by a new trainer")
            self.push(pusher, 4, as_="4 with other weights by a new trainer", of=5)
            self.push(pusher, 4, as_="4 by a new trainer")
            self.push(pusher, 5)
        with self.new() as pusher:
            self.push(pusher, 6)
            self.push(pusher, 7 + self.rank, as_="ranks differ", of=7)


def main(rank: int, size: int, rendezvous: str, out: str, store: str, engines: list[str]) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    trainer = Rank(rank, size, store, engines)
    trainer.run()
    Path(out).write_text(json.dumps(trainer.seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], sys.argv[6:])
