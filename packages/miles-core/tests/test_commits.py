"""A checkpoint that is being completed counts, or does not, before anybody looks for the newest one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from miles_core.config import CheckpointConfig
from miles_core.durable.checkpoints import Checkpoints
from miles_core.run.commits import TRAINER, Commits
from miles_train.errors import CheckpointError


class SlowCheckpoints(Checkpoints):
    """Completes when it is allowed to, as on a disk that takes its time to flush."""

    def __init__(self, folder: Path, *, error: CheckpointError | None = None) -> None:
        super().__init__(folder)
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.error = error

    def complete(self, step: int, state: Mapping[str, Any]) -> Path:
        self.begun.set()
        assert self.may_end.wait(timeout=10.0)
        if self.error is not None:
            raise self.error
        return super().complete(step, state)


class FakeTrainers:
    async def begin_save(self, path: Path) -> None:
        path.mkdir()
        (path / "weights").write_bytes(b"w" * 100)

    async def finish_save(self) -> None: ...


async def let_go(commits: Commits, checkpoints: SlowCheckpoints) -> None:
    """The ranks die while the checkpoint of step 3 is flushed; the disk is done only then."""
    await commits.begin(3, trainers=FakeTrainers(), state={})  # pyright: ignore[reportArgumentType]
    await asyncio.to_thread(checkpoints.begun.wait, 10.0)
    asyncio.get_running_loop().call_later(0.05, checkpoints.may_end.set)
    await commits.give_up()


def test_a_checkpoint_that_is_let_go_of_while_it_is_flushed_counts(tmp_path: Path) -> None:
    """No thread completes it later, when the run has gone back behind it."""
    checkpoints = SlowCheckpoints(tmp_path / "checkpoints")
    commits = Commits(CheckpointConfig(), checkpoints=checkpoints, ledger=None)
    asyncio.run(let_go(commits, checkpoints))
    found = checkpoints.latest()
    assert found is not None
    assert found.step == commits.last == 3
    assert (found.path / TRAINER / "weights").stat().st_size == 100


def test_one_that_the_disk_refuses_then_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = SlowCheckpoints(tmp_path / "checkpoints", error=CheckpointError("no space"))
    commits = Commits(CheckpointConfig(), checkpoints=checkpoints, ledger=None)
    asyncio.run(let_go(commits, checkpoints))
    assert commits.last == 0
    assert checkpoints.latest() is None
    assert not list((tmp_path / "checkpoints").iterdir())
    assert "no space" in caplog.text
