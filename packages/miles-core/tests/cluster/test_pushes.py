"""A push that misses an engine is a success for the others; the engine is dead until it gets the version alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fake_ray import FakeRay
from miles_core.actors.trainer_rank import Pushed, TrainerRank
from miles_core.cluster import TrainerRanks, remote
from miles_rollout.engines import EngineState, HealthConfig, Supervisor
from miles_tito.errors import EngineError
from miles_train.config import TrainConfig
from miles_weightsync.errors import SyncError

FIRST, SECOND = "http://one", "http://two"


class Server:
    """An engine that never ends by itself and starts at once."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def start(self) -> None: ...

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def kill(self) -> None: ...

    async def log_tail(self) -> str:
        return ""


class Around:
    """Routing and probe that say yes to everything."""

    async def route(self, urls: Sequence[str]) -> None: ...

    async def version(self, url: str) -> int | None:
        return None

    async def makes_progress(self, url: str) -> bool:
        return True

    async def abort_all(self, url: str) -> None: ...


class Fleet:
    """A supervised fleet, and a trainer rank whose pushes fail as `failing` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay({TrainerRank: lambda **_: self})
        monkeypatch.setattr(remote, "ray", self.ray)
        self.failing: dict[str, int] = {}
        """How often the push to an engine still fails."""
        self.pushes: list[tuple[int, tuple[str, ...]]] = []
        self.trainers = TrainerRanks(TrainConfig())
        self.supervisor = Supervisor(
            [Server(FIRST), Server(SECOND)],
            routing=Around(),
            probe=Around(),
            sync=self.trainers.sync,
            config=HealthConfig(backoff_s=0.001, backoff_max_s=0.001),
        )
        self.supervisor.started()

    def push(self, version: int, engines: Sequence[str]) -> Pushed:
        """As the rank answers."""
        self.pushes.append((version, tuple(engines)))
        failed = [url for url in engines if self.failing.get(url, 0) > 0]
        for url in failed:
            self.failing[url] -= 1
        return Pushed(failed=dict.fromkeys(failed, "load: refused"))

    async def push_all(self, version: int) -> dict[str, float]:
        return await self.trainers.push(version, engines=self.supervisor)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


async def test_an_engine_that_fails_once_is_pushed_to_again_and_serves_on(fleet: Fleet):
    fleet.failing = {FIRST: 1}
    metrics = await fleet.push_all(0)
    assert fleet.pushes == [(0, (FIRST, SECOND)), (0, (FIRST,))]
    assert fleet.supervisor.serving == (FIRST, SECOND)
    assert (metrics["sync/retries"], metrics["sync/failed_engines"]) == (1.0, 0.0)


async def test_an_engine_that_fails_twice_is_dead_and_then_gets_the_version_alone(fleet: Fleet):
    fleet.failing = {FIRST: 2}
    metrics = await fleet.push_all(0)
    assert metrics["sync/failed_engines"] == 1.0
    assert fleet.supervisor.serving == (SECOND,)
    running = asyncio.create_task(fleet.supervisor.run())
    async with asyncio.timeout(5):
        while fleet.supervisor.states[FIRST] is not EngineState.HEALTHY:
            await asyncio.sleep(0.001)
    assert fleet.pushes[-1] == (0, (FIRST,))
    running.cancel()


async def test_a_push_that_reaches_nobody_waits_for_an_engine_to_come_back(fleet: Fleet):
    await fleet.push_all(0)
    fleet.failing = {FIRST: 2, SECOND: 2}
    push = asyncio.create_task(fleet.push_all(1))
    running = asyncio.create_task(fleet.supervisor.run())
    assert (await push)["sync/failed_engines"] == 2.0
    assert fleet.supervisor.serving
    assert (1, (FIRST,)) in fleet.pushes or (1, (SECOND,)) in fleet.pushes
    running.cancel()


async def test_the_first_push_of_a_run_that_reaches_nobody_ends_it_with_the_reason(fleet: Fleet):
    fleet.failing = {FIRST: 2, SECOND: 2}
    with pytest.raises(SyncError, match="Version 0 reached no engine: http://one failed in load: refused; http://two"):
        await fleet.push_all(0)


async def test_a_lost_trainer_does_not_end_the_supervision_of_an_engine(fleet: Fleet):
    await fleet.push_all(0)
    fleet.ray.actors[0].die()
    with pytest.raises(
        EngineError, match="version 0 was not sent to http://one: The process of trainer rank 0 died in `push`"
    ):
        await fleet.trainers.sync(FIRST)
