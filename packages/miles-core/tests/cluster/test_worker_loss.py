"""A worker process that dies is replaced once, and its groups run again elsewhere under a higher attempt."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from miles_core.actors.rollout_worker import WORKER_LOST
from miles_core.cluster import respawn, workers
from miles_core.cluster.respawn import PartLostError
from miles_core.cluster.workers import Workers
from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_rollout.buffer import GroupBuffer
from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import GroupRequest
from miles_rollout.fates import Fate
from miles_tito.records import Prompt
from ray.exceptions import RayActorError


class Method:
    """A remote method; a dead actor's raises."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._actor.call(self._name, args)


class Actor:
    """Stands where a worker actor does."""

    def __init__(self, deadly: set[str], made: list[Actor]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._deadly = deadly
        self._died = asyncio.Event()
        made.append(self)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    async def call(self, name: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((name, args))
        if name != "run_group":
            return None
        (request,) = args
        if request.group_id in self._deadly:
            self._died.set()
        if self._deadly:
            await self._died.wait()
            raise RayActorError
        return f"group {request.group_id} attempt {request.attempt}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Workers over fake actors, the actors made so far, and the groups that kill the process they run in."""

    made: list[Actor] = []
    deadly: set[str] = set()
    told: list[tuple[str, str, str]] = []
    monkeypatch.setattr(workers, "spawn", lambda *args, **options: lambda: Actor(deadly, made))
    monkeypatch.setattr(workers.ray, "kill", lambda actor: None)
    monkeypatch.setattr(respawn, "BACKOFF_S", 0.0)
    made_of = Workers(
        Config(rollout=RolloutConfig(retries=1)),
        run_dir=RunDir(path=tmp_path),
        note=lambda *words: told.append(words),
    )
    return SimpleNamespace(workers=made_of, made=made, deadly=deadly, told=told)


def run(cluster: Any, group_id: str) -> asyncio.Task[Any]:
    call = cluster.workers.run_group(GroupRequest(prompt=Prompt(id="p"), group_id=group_id, group_size=2))
    return asyncio.ensure_future(call)


async def test_groups_of_a_dead_worker_run_again_with_a_higher_attempt_in_one_new_process(cluster: Any):
    cluster.deadly.add("g1")
    groups = [run(cluster, "g0"), run(cluster, "g1"), run(cluster, "g2")]
    await asyncio.sleep(0)
    while not cluster.made[0]._died.is_set():
        await asyncio.sleep(0)
    cluster.deadly.clear()
    assert await asyncio.gather(*groups) == [f"group g{i} attempt 2" for i in range(3)]
    assert len(cluster.made) == 2
    assert cluster.told == [("worker", "worker-0", "gone, started again: its process died")]


async def test_a_group_that_loses_three_workers_has_failed_with_the_reason_and_counts_as_failure(cluster: Any):
    cluster.deadly.add("g0")
    ref = await run(cluster, "g0")
    assert len(cluster.made) == 4
    assert all(WORKER_LOST in (episode.error or "") for episode in ref.episodes)
    assert [episode.reward for episode in ref.episodes] == [None, None]
    fates: list[tuple[Fate, str]] = []
    config = RolloutConfig(group_size=2, groups_per_step=1)
    buffer = GroupBuffer(config, observer=lambda event: fates.append((event.fate, event.reason)))
    await buffer.acquire()
    buffer.issue("g0", Prompt(id="p"))
    assert buffer.put(ref) is Fate.FAILED
    assert fates[-1] == (Fate.FAILED, WORKER_LOST)


async def test_a_worker_that_dies_again_and_again_ends_the_run(cluster: Any):
    cluster.deadly |= {f"g{i}" for i in range(9)}
    await run(cluster, "g0")
    await asyncio.wait([second := run(cluster, "g1")])
    with pytest.raises(PartLostError, match="worker worker-0 died 6 times within 300 s"):
        second.result()


async def test_groups_that_ran_beside_the_one_that_kills_do_not_fail_for_it(cluster: Any, monkeypatch: Any):
    """The fake dies at once in the group that kills, and takes down whatever runs in it then."""

    async def call(actor: Actor, name: str, args: tuple[Any, ...]) -> Any:
        if name != "run_group":
            return None
        (request,) = args
        if request.group_id in cluster.deadly:
            actor._died.set()
        for _ in range(20):  # long enough for the others to be under way
            await asyncio.sleep(0)
            if actor._died.is_set():
                raise RayActorError
        return f"group {request.group_id}"

    monkeypatch.setattr(Actor, "call", call)
    cluster.deadly.add("g2")
    results = await asyncio.gather(*(run(cluster, f"g{i}") for i in range(5)))
    assert [r for r in results if isinstance(r, str)] == ["group g0", "group g1", "group g3", "group g4"]
    assert WORKER_LOST in (results[2].episodes[0].error or "")
    assert len(cluster.made) == 4


async def test_a_worker_that_dies_while_it_opens_is_replaced_as_well(cluster: Any, monkeypatch: pytest.MonkeyPatch):
    cluster.deadly.add("g0")
    whole = Actor.call
    deaths = 2

    async def call(actor: Actor, name: str, args: tuple[Any, ...]) -> Any:
        nonlocal deaths
        if name == "open" and deaths:
            deaths -= 1
            cluster.deadly.clear()
            raise RayActorError
        return await whole(actor, name, args)

    monkeypatch.setattr(Actor, "call", call)
    assert await run(cluster, "g0") == "group g0 attempt 2"
    assert len(cluster.made) == 4
