"""Takes the place of Ray in `miles_core.cluster.remote`: the objects live in this process, and die when told to."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError


class FakeRay:
    """What `Remote` asks of Ray. Put it in place of the name `ray` of that module."""

    def __init__(self, stand_ins: Mapping[type, Callable[..., Any]] | None = None) -> None:
        """
        Args:
            stand_ins: what is made in place of objects of a class; the class itself makes those of any other.
        """
        self._stand_ins = stand_ins or {}
        self.actors: list[FakeActor] = []
        """Every process so far."""
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def remote(self, **options: Any) -> Callable[[type], Any]:
        def decorate(made: type) -> Any:
            plain = made.__bases__[1]  # behind what `Remote` adds
            make = self._stand_ins.get(plain, plain)
            return SimpleNamespace(remote=lambda *args, **kwargs: self.spawn(plain, make(*args, **kwargs)))

        return decorate

    def kill(self, actor: FakeActor) -> None:
        actor.die()

    def cancel(self, ref: Ref) -> None:
        ref.task.cancel()

    def put(self, value: Any) -> Any:
        return value

    def get(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)

    def of(self, plain: type) -> list[FakeActor]:
        """The processes of one class so far."""
        return [actor for actor in self.actors if actor.plain is plain]

    def on_death(self, actor: FakeActor) -> None:
        """A process is gone; what it ran is cancelled next."""

    async def run(self, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call inside the process; a test that has things go wrong does so here."""
        result = getattr(actor.held, name)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def spawn(self, plain: type, held: Any) -> FakeActor:
        """A new process around an object."""
        self.actors.append(FakeActor(self, plain, held))
        return self.actors[-1]


class Ref(asyncio.Future[Any]):
    """The result of one call."""

    task: asyncio.Task[Any]


class FakeActor:
    """One process."""

    def __init__(self, ray: FakeRay, plain: type, held: Any) -> None:
        self._ray = ray
        self._calls: dict[Ref, None] = {}
        self.plain = plain
        self.held = held
        """The object."""
        self.is_dead = False

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def die(self) -> None:
        """The process is gone, and all that it was doing."""
        if self.is_dead:
            return
        self.is_dead = True
        self._ray.on_death(self)
        for ref in [*self._calls]:
            ref.task.cancel()
            _settle(ref, error=RayActorError())
        self._calls.clear()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        ref = Ref(loop=asyncio.get_running_loop())
        if self.is_dead:
            _settle(ref, error=RayActorError())
            return ref
        if name == "in_thread":
            name, *args = args  # pyright: ignore[reportAssignmentType]
        if name == "node_address":
            _settle(ref, result="127.0.0.1")
            return ref
        self._calls[ref] = None
        ref.task = asyncio.get_running_loop().create_task(self._ray.run(self, name, tuple(args), kwargs), name=name)
        ref.task.add_done_callback(lambda task: self._answer(ref, task))
        return ref

    def _answer(self, ref: Ref, task: asyncio.Task[Any]) -> None:
        self._calls.pop(ref, None)
        if task.cancelled():
            _settle(ref, error=RayActorError() if self.is_dead else asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            _settle(ref, error=error)
        else:
            _settle(ref, result=task.result())


class _Method:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def options(self, **options: Any) -> _Method:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Ref:
        return self._actor.call(self._name, args, kwargs)


def _settle(ref: Ref, *, result: Any = None, error: BaseException | None = None) -> None:
    """Nobody needs to look at a result: a caller may have left."""
    if ref.done():
        return
    if isinstance(error, asyncio.CancelledError):
        ref.cancel()
    elif error is not None:
        ref.set_exception(error)
        ref.exception()
    else:
        ref.set_result(result)
