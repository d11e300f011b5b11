"""A worker process that dies is replaced once, and its groups run again elsewhere under a higher attempt."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeActor, FakeRay
from miles_core.actors.rollout_worker import WORKER_LOST, RolloutWorker
from miles_core.cluster import RolloutWorkers, remote
from miles_core.cluster.remote import ProcessLostError
from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_rollout.buffer import GroupBuffer
from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import GroupRequest
from miles_rollout.fates import Fate
from miles_tito.records import Prompt


class Rollout:
    """Stands where the object of a worker's process does."""

    async def open(self) -> None: ...

    async def pause(self, is_paused: bool) -> None: ...


class Deadly(FakeRay):
    """Worker processes that some groups kill, and with them all that runs there."""

    def __init__(self) -> None:
        super().__init__({RolloutWorker: lambda **_: Rollout()})
        self.deadly: set[str] = set()

    async def run(self, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "run_group":
            return await super().run(actor, name, args, kwargs)
        (request,) = args
        group = request.group_id
        if group in self.deadly:
            actor.die()
        if self.deadly:
            await asyncio.Event().wait()
        return f"group {group} attempt {request.attempt}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Workers over processes that die, the processes made so far, and the groups that kill the one they run in."""
    ray = Deadly()
    told: list[tuple[str, str, str]] = []
    monkeypatch.setattr(remote, "ray", ray)
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    workers = RolloutWorkers(
        Config(rollout=RolloutConfig(retries=1)),
        run_dir=RunDir(path=tmp_path),
        on_event=lambda *words: told.append(words),
    )
    return SimpleNamespace(workers=workers, made=ray.actors, deadly=ray.deadly, told=told)


def run(cluster: Any, group_id: str) -> asyncio.Task[Any]:
    call = cluster.workers.run_group(GroupRequest(prompt=Prompt(id="p"), group_id=group_id, group_size=2))
    return asyncio.ensure_future(call)


async def test_groups_of_a_dead_worker_run_again_with_a_higher_attempt_in_one_new_process(cluster: Any):
    cluster.deadly.add("g1")
    groups = [run(cluster, "g0"), run(cluster, "g1"), run(cluster, "g2")]
    await asyncio.sleep(0)
    while not cluster.made[0].is_dead:
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


async def test_the_workers_are_idle_when_no_group_runs_not_even_one_that_has_just_been_given_to_them(cluster: Any):
    group = run(cluster, "g0")  # has not begun
    idle = asyncio.ensure_future(cluster.workers.idle())
    done, _ = await asyncio.wait([group, idle], return_when=asyncio.FIRST_COMPLETED)
    assert group in done
    await idle


async def test_a_worker_that_dies_again_and_again_ends_the_run(cluster: Any):
    cluster.deadly |= {f"g{i}" for i in range(9)}
    await run(cluster, "g0")
    await asyncio.wait([second := run(cluster, "g1")])
    with pytest.raises(ProcessLostError, match="worker worker-0 died 6 times within 300 s"):
        second.result()


async def test_groups_that_ran_beside_the_one_that_kills_do_not_fail_for_it(cluster: Any, monkeypatch: Any):
    """The process dies at once in the group that kills, and takes down whatever runs in it then."""

    async def run_in(ray: Deadly, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "run_group":
            return None
        (request,) = args
        if request.group_id in cluster.deadly:
            actor.die()
        for _ in range(20):  # long enough for the others to be under way
            await asyncio.sleep(0)
        return f"group {request.group_id}"

    monkeypatch.setattr(Deadly, "run", run_in)
    cluster.deadly.add("g2")
    results = await asyncio.gather(*(run(cluster, f"g{i}") for i in range(5)))
    assert [r for r in results if isinstance(r, str)] == ["group g0", "group g1", "group g3", "group g4"]
    assert WORKER_LOST in (results[2].episodes[0].error or "")
    assert len(cluster.made) == 4


async def test_a_worker_that_dies_while_it_opens_is_replaced_as_well(cluster: Any, monkeypatch: pytest.MonkeyPatch):
    cluster.deadly.add("g0")
    whole = Deadly.run
    deaths = 2

    async def run_in(ray: Deadly, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal deaths
        if name == "open" and deaths:
            deaths -= 1
            cluster.deadly.clear()
            actor.die()
        return await whole(ray, actor, name, args, kwargs)

    monkeypatch.setattr(Deadly, "run", run_in)
    assert await run(cluster, "g0") == "group g0 attempt 2"
    assert len(cluster.made) == 4
