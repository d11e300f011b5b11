"""An engine that came back never gets weights between a step and its push."""

from __future__ import annotations

import asyncio

from miles_core.cluster.turns import Turns


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Syncing:
    """A sync that is asked for at once and notes the version it got."""

    def __init__(self, turns: Turns) -> None:
        self.version: int | None = None
        self._turns = turns
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._turns.sync() as version:
            self.version = version


async def test_a_sync_waits_for_the_first_push():
    turns = Turns()
    sync = Syncing(turns)
    await settled()
    assert sync.version is None
    async with turns.push(0):
        await settled()
        assert sync.version is None
    await sync.task
    assert sync.version == 0


async def test_a_sync_asked_for_during_a_step_gets_the_version_of_its_push():
    turns = Turns()
    async with turns.push(4):
        pass
    await turns.begin_step()
    sync = Syncing(turns)
    await settled()
    assert sync.version is None
    async with turns.push(5):
        pass
    await sync.task
    assert sync.version == 5


async def test_a_step_waits_for_a_sync_that_runs():
    turns = Turns()
    async with turns.push(4):
        pass
    async with turns.sync() as version:
        assert version == 4
        step = asyncio.create_task(turns.begin_step())
        await settled()
        assert not step.done()
    await step


async def test_nothing_is_synced_between_the_loss_of_the_trainer_and_the_next_push():
    turns = Turns()
    async with turns.push(4):
        pass
    await turns.begin_step()
    turns.forget()
    sync = Syncing(turns)
    await settled()
    assert sync.version is None
    async with turns.push(3):
        pass
    await sync.task
    assert sync.version == 3


async def test_a_push_that_raised_leaves_no_version_behind():
    turns = Turns()
    await turns.begin_step()
    try:
        async with turns.push(1):
            raise RuntimeError("a rank died")
    except RuntimeError:
        pass
    sync = Syncing(turns)
    await settled()
    assert sync.version is None
    sync.task.cancel()


async def test_steps_without_a_push_follow_one_another():
    turns = Turns()
    for _ in range(3):
        await asyncio.wait_for(turns.begin_step(), 1)
    async with turns.push(0):
        pass
    async with turns.sync() as version:
        assert version == 0
