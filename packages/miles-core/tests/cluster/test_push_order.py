"""An engine that came back never gets weights between a step and its push."""

from __future__ import annotations

import asyncio

from miles_core.cluster.push_order import PushOrder


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Syncing:
    """A sync that is asked for at once and notes the version it got."""

    def __init__(self, order: PushOrder) -> None:
        self.version: int | None = None
        self._order = order
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._order.sync() as version:
            self.version = version


async def test_a_sync_waits_for_the_first_push():
    order = PushOrder()
    sync = Syncing(order)
    await settled()
    assert sync.version is None
    async with order.push(0):
        await settled()
        assert sync.version is None
    await sync.task
    assert sync.version == 0


async def test_a_sync_asked_for_during_a_step_gets_the_version_of_its_push():
    order = PushOrder()
    async with order.push(4):
        pass
    await order.begin_step()
    sync = Syncing(order)
    await settled()
    assert sync.version is None
    async with order.push(5):
        pass
    await sync.task
    assert sync.version == 5


async def test_a_step_waits_for_a_sync_that_runs():
    order = PushOrder()
    async with order.push(4):
        pass
    async with order.sync() as version:
        assert version == 4
        step = asyncio.create_task(order.begin_step())
        await settled()
        assert not step.done()
    await step


async def test_nothing_is_synced_between_the_loss_of_the_trainer_and_the_next_push():
    order = PushOrder()
    async with order.push(4):
        pass
    await order.begin_step()
    order.invalidate()
    sync = Syncing(order)
    await settled()
    assert sync.version is None
    async with order.push(3):
        pass
    await sync.task
    assert sync.version == 3


async def test_a_push_that_raised_leaves_no_version_behind():
    order = PushOrder()
    await order.begin_step()
    try:
        async with order.push(1):
            raise RuntimeError("a rank died")
    except RuntimeError:
        pass
    sync = Syncing(order)
    await settled()
    assert sync.version is None
    sync.task.cancel()


async def test_steps_without_a_push_follow_one_another():
    order = PushOrder()
    for _ in range(3):
        await asyncio.wait_for(order.begin_step(), 1)
    async with order.push(0):
        pass
    async with order.sync() as version:
        assert version == 0
