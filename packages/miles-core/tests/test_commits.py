"""When a checkpoint is written, and what happens when it cannot be."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from miles_core.checkpoints import Checkpoints
from miles_core.commits import TRAINER, Commits
from miles_core.config import CheckpointConfig
from miles_core.ledger import Ledger
from miles_rollout.fates import Fate, FateEvent


class Ranks:
    """Trainer ranks that write one file when they are let."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.error: Exception | None = None
        self._path = Path()

    async def begin_save(self, path: Path) -> None:
        self._path = path

    async def finish_save(self) -> None:
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        self._path.mkdir()
        (self._path / "weights").write_bytes(b"w" * 10)


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger.open(tmp_path / "ledger.db", create=True)
    ledger.start(None)
    yield ledger
    ledger.close()


def make(tmp_path: Path, ledger: Ledger | None, **config: Any) -> Commits:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    return Commits(CheckpointConfig(**config), checkpoints=checkpoints, ledger=ledger)


def play(main: Callable[[Ranks], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await main(Ranks())

    asyncio.run(run())


def train(ledger: Ledger, step: int) -> None:
    ledger(FateEvent(group_id=f"g{step}", prompt_id="p", fate=Fate.IN_FLIGHT, reason="", version=step - 1))
    ledger(FateEvent(group_id=f"g{step}", prompt_id="p", fate=Fate.TRAINED, reason="", version=step))


def test_its_turn_the_end_and_a_request_make_a_checkpoint_due(tmp_path: Path) -> None:
    commits = make(tmp_path, None, every=4)
    assert [step for step in range(1, 11) if commits.is_due(step, is_last=step == 10)] == [4, 8, 10]
    (tmp_path / "save_now").touch()
    assert commits.is_due(5, is_last=False)
    assert not commits.is_due(5, is_last=False), "a request counts once"
    only_asked = make(tmp_path, None, every=0, at_end=False)
    assert not any(only_asked.is_due(step, is_last=step == 10) for step in range(1, 11))


def test_a_step_is_committed_when_its_checkpoint_is_whole_and_not_before(tmp_path: Path, ledger: Ledger) -> None:
    async def main(ranks: Ranks) -> None:
        commits = make(tmp_path, ledger)
        train(ledger, 1)
        await commits.begin(1, trainers=ranks, state={"drawn": 7})  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0)
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        assert (commits.last, checkpoints.latest()) == (0, None)
        ranks.may_finish.set()
        await commits.drain()
        found = checkpoints.latest()
        assert found is not None
        assert (commits.last, found.step, checkpoints.load_state(found)["drawn"]) == (1, 1, 7)
        assert (found.path / TRAINER / "weights").exists()

    play(main)


def test_a_checkpoint_that_fails_is_told_at_the_next_step_and_leaves_nothing(tmp_path: Path) -> None:
    async def main(ranks: Ranks) -> None:
        commits = make(tmp_path, None)
        ranks.error = OSError(errno.ENOSPC, "No space left on device")
        await commits.begin(1, trainers=ranks, state={})  # pyright: ignore[reportArgumentType]
        await commits.check()  # not known yet
        ranks.may_finish.set()
        for _ in range(5):
            await asyncio.sleep(0)
        with pytest.raises(OSError, match="No space left"):
            await commits.check()
        assert list((tmp_path / "checkpoints").iterdir()) == []
        await commits.check()  # told once

    play(main)


def test_one_that_is_let_go_of_is_no_checkpoint_and_no_error(tmp_path: Path) -> None:
    async def main(ranks: Ranks) -> None:
        commits = make(tmp_path, None)
        await commits.begin(1, trainers=ranks, state={})  # pyright: ignore[reportArgumentType]
        await commits.forget()
        assert list((tmp_path / "checkpoints").iterdir()) == []
        await commits.drain()
        ranks.may_finish.set()
        await commits.begin(1, trainers=ranks, state={})  # pyright: ignore[reportArgumentType]
        await commits.drain()
        assert commits.last == 1

    play(main)


def test_the_next_checkpoint_waits_for_the_one_that_is_being_written(tmp_path: Path) -> None:
    async def main(ranks: Ranks) -> None:
        commits = make(tmp_path, None)
        await commits.begin(1, trainers=ranks, state={})  # pyright: ignore[reportArgumentType]
        second = asyncio.create_task(commits.begin(2, trainers=ranks, state={}))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.01)
        assert not second.done()
        ranks.may_finish.set()
        assert (await second)["time/checkpoint_wait"] > 0
        assert commits.last == 1
        await commits.drain()
        assert commits.last == 2

    play(main)
