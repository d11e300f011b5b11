"""A plain object in a process of its own: what its calls raise, what cancelling them does, and what its death means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_ray import FakeRay
from miles_core.cluster import remote
from miles_core.cluster.remote import ProcessDied, ProcessLostError, Remote, call_each, stop_all
from miles_rollout.engines import EngineDied
from ray.exceptions import RayActorError, RayTaskError

DIED = EngineDied("The engine exited with status 137.\nThe last lines of its log:\nfirst\nlast")


class Server:
    """A plain class with coroutines, as most are."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.was_cancelled = False
        self.never = asyncio.Event()

    async def watch(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def wait(self) -> None:
        try:
            await self.never.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def collective(self) -> Any:
        return await (self.watch() if self.result else self.wait())

    async def stop(self) -> None: ...


class Stubborn(Server):
    async def stop(self) -> None:
        await self.never.wait()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(remote, "ray", fake)
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    return fake


def spawned(plain: type = Server, *args: Any, on_event: Callable[[str, str, str], None] | None = None) -> Remote:
    made = Remote(plain, kind="server", name="a", on_event=on_event)
    made.spawn(*args)
    return made


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (None, "it was stopped"),
        ("it exited with status 137", "it exited with status 137"),
        (RayActorError(), "its process died"),
        (DIED, "The engine exited with status 137."),
        (
            RayTaskError("watch", "a long traceback", DIED).as_instanceof_cause(),
            "The engine exited with status 137.",
        ),
    ],
)
async def test_why_an_object_ended_is_one_line(ray: FakeRay, result: Any, why: str) -> None:
    assert await spawned(Server, result).ended("watch") == why


async def test_a_call_raises_what_the_method_raised_and_not_rays_wrapping(ray: FakeRay) -> None:
    wrapped = RayTaskError("watch", "a long traceback", DIED).as_instanceof_cause()
    with pytest.raises(EngineDied) as caught:
        await spawned(Server, wrapped).call("watch")
    assert caught.value is DIED
    assert caught.value.__cause__ is wrapped, "the trace in its process is not lost"


async def test_cancelling_a_call_cancels_its_coroutine(ray: FakeRay) -> None:
    server = spawned()
    call = asyncio.ensure_future(server.call("wait"))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)
    assert ray.actors[0].held.was_cancelled


async def test_a_call_to_a_dead_process_names_it_and_the_handle_serves_its_successor(ray: FakeRay) -> None:
    server = spawned()
    call = asyncio.ensure_future(server.call("wait"))
    await asyncio.sleep(0.01)
    ray.actors[0].die()
    with pytest.raises(ProcessDied, match="The process of server a died in `wait`; its log is in Ray's session folder"):
        await call
    server.spawn("back")
    assert await server.call("watch") == "back"
    assert server.spawned == 2


async def test_a_process_that_dies_again_and_again_ends_the_run(ray: FakeRay) -> None:
    events: list[tuple[str, str, str]] = []
    server = spawned(on_event=lambda *event: events.append(event))
    for _ in range(remote.MAX_DEATHS):
        await server.backoff("its process died")
    assert events == [("server", "a", "gone, started again: its process died")] * remote.MAX_DEATHS
    with pytest.raises(ProcessLostError, match="server a died 6 times within 300 s; the last time: out of memory"):
        await server.backoff("out of memory")


async def test_of_many_the_dead_one_is_named_though_another_complained_first(ray: FakeRay) -> None:
    broken, dying = spawned(Server, ConnectionError("connection closed by peer")), spawned()
    calls = asyncio.ensure_future(call_each([broken, dying], "collective", [(), ()]))
    await asyncio.sleep(0.01)
    assert not calls.done(), "it waits for a death that would explain the complaint"
    ray.actors[1].die()
    with pytest.raises(ProcessDied, match="died in `collective`"):
        await calls


async def test_of_many_a_complaint_that_no_death_explains_is_raised(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "DEATH_S", 0.01)
    with pytest.raises(ConnectionError):
        await call_each([spawned(Server, ConnectionError("no route")), spawned()], "collective", [(), ()])


async def test_what_does_not_stop_in_time_is_killed(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "STOP_S", 0.01)
    await stop_all([spawned(Stubborn), spawned()])
    assert [actor.is_dead for actor in ray.actors] == [True, True]
    assert "2 processes (server) did not stop within" in caplog.text
