"""A plain object in a process of its own, by way of Ray: made, called, ended, and made again when its process died.

    Remote(RolloutWorker) ──spawn(…)──▶ process ──call("run_group", …)──▶ the object's own method
              ▲                            ✕ ProcessDied
              └── backoff(why): longer with each death, until there were too many: ProcessLostError

A class needs to know nothing of this. Its coroutines run on the loop of the process; where it has any, its plain
methods run in a thread beside that loop, else in the one thread that made the object.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from miles_rollout.errors import first_line
from miles_tito.errors import MilesError
from miles_tito.records import Group
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from miles_core.durable.spool import fetch_groups

logger = logging.getLogger(__name__)

STOP_S = 8.0
"""Every process of a run ends within this, or is killed."""
DEATH_S = 5.0
"""From the death of a process until every caller knows."""
MAX_DEATHS = 5
SPELL_S = 300.0
"""Deaths longer ago than this no longer count."""
BACKOFF_S = 0.5

OnEvent = Callable[[str, str, str], None]
"""Called with what happens to the processes of a run: the kind of process, which one, what happened."""


class ProcessDied(MilesError, RuntimeError):
    """The process of a remote object is gone, and the call with it."""


class ProcessLostError(MilesError, RuntimeError):
    """A process of the run dies again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a process gets. CPUs are not reserved: on a small machine every process shares them."""

    num_gpus: int = 0
    threads: int | None = None
    """OpenMP threads."""
    concurrency: int | None = None
    """Calls at once; those beyond it wait."""
    groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups of calls that do not wait for the others, and how many of each run at once."""

    def options(self) -> dict[str, Any]:
        """As `ray.remote` takes them."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.num_gpus}
        if self.threads is not None:
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(self.threads)}}
        if self.concurrency is not None:
            options["max_concurrency"] = self.concurrency
        if self.groups:
            options["concurrency_groups"] = dict(self.groups)
        return options


class Remote:
    """The driver's handle on one object in another process, whatever becomes of the process.

    The driver makes one for each process of a run and keeps it: `spawn` starts the process, and again in place of one
    that died. Every call raises what the method raised, or ProcessDied.
    """

    def __init__(
        self,
        plain: type,
        *,
        kind: str,
        name: str = "",
        resources: Resources = Resources(),
        on_event: OnEvent | None = None,
    ) -> None:
        """
        Args:
            plain: class of the object.
            kind: what the process is, for people: "worker", "router".
            name: which one of its kind.
            on_event: called when it died and is started again.
        """
        self._plain = plain
        self._has_coroutines = bool(inspect.getmembers(plain, inspect.iscoroutinefunction))
        self._made = ray.remote(**resources.options())(
            type(plain.__name__, (_Threads if self._has_coroutines else _Node, plain), {})
        )
        self.kind = kind
        self.name = name
        self._on_event = on_event
        self._deaths: list[float] = []
        self._actor: Any = None
        self.spawned = 0
        """Processes so far: tells whether one that a caller saw die has been replaced."""

    def spawn(self, *args: Any, **kwargs: Any) -> None:
        """Make the object in a new process; the one before is killed. Returns at once."""
        self.kill()
        self.spawned += 1
        self._actor = self._made.remote(*args, **kwargs)

    def kill(self) -> None:
        """End the process, and whatever it started, if there is one."""
        if self._actor is not None:
            ray.kill(self._actor)

    async def call(self, method: str, *args: Any, group: str | None = None, **kwargs: Any) -> Any:
        """Call a method of the object. Cancelling the call cancels a coroutine there; a plain method goes on.

        Args:
            group: of `Resources.groups`, for a call that does not wait for the others.

        Raises:
            ProcessDied: the process died before it answered.
        """
        is_coroutine = inspect.iscoroutinefunction(getattr(self._plain, method, None))
        called = method
        if self._has_coroutines and not is_coroutine:
            called, args = "in_thread", (method, *args)
        bound = getattr(self._actor, called)
        ref = (bound if group is None else bound.options(concurrency_group=group)).remote(*args, **kwargs)
        try:
            return await ref
        except asyncio.CancelledError:
            if is_coroutine:
                ray.cancel(ref)
            raise
        except RayActorError as error:
            raise ProcessDied(
                f"The process of {self.kind} {self.name} died in `{method}`; its log is in Ray's session folder."
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from error  # what the method raised; the trace in its process is behind it
            raise

    async def ended(self, method: str) -> str:
        """Wait for a call that lasts as long as the object does; returns why it ended, in one line."""
        try:
            return await self.call(method) or "it was stopped"
        except ProcessDied:
            return "its process died"
        except MilesError as error:
            return first_line(str(error))

    async def backoff(self, why: str) -> None:
        """Record one more death, and wait before the next start: longer, the more there were.

        Raises:
            ProcessLostError: there were too many.
        """
        now = asyncio.get_running_loop().time()
        self._deaths = [*(then for then in self._deaths if now - then < SPELL_S), now]
        logger.warning("%s %s is gone and is started again: %s", self.kind, self.name, why)
        if self._on_event is not None:
            self._on_event(self.kind, self.name, f"gone, started again: {why}")
        if len(self._deaths) > MAX_DEATHS:
            raise ProcessLostError(
                f"{self.kind} {self.name} died {len(self._deaths)} times within {SPELL_S:.0f} s; the last time: {why}"
            )
        await asyncio.sleep(BACKOFF_S * 2 ** (len(self._deaths) - 1))


async def call_each(
    remotes: Sequence[Remote], method: str, args_R: Sequence[tuple[Any, ...]], *, group: str | None = None
) -> list[Any]:
    """The same method of every object at once, each with its own arguments.

    Raises:
        ProcessDied: a process is gone. When one dies, what another says about its broken connection may come first,
            so any error is held back until that is known.
    """
    calls = [
        asyncio.ensure_future(remote.call(method, *args, group=group))
        for remote, args in zip(remotes, args_R, strict=True)
    ]
    try:
        return await asyncio.gather(*calls)
    except ProcessDied:
        raise
    except Exception as error:
        await asyncio.wait(calls, timeout=DEATH_S)
        for call in calls:
            if call.done() and not call.cancelled() and isinstance(died := call.exception(), ProcessDied):
                raise died from error
        raise
    finally:
        for call in calls:
            call.cancel()


async def stop_all(remotes: Sequence[Remote]) -> None:
    """Ask every object to stop, wait a bounded time, then kill its process."""
    asked = asyncio.gather(*(remote.call("stop") for remote in remotes), return_exceptions=True)
    try:
        async with asyncio.timeout(STOP_S):
            for remote, result in zip(remotes, await asked, strict=True):
                if isinstance(result, Exception) and not isinstance(result, ProcessDied):
                    logger.warning("%s %s did not stop cleanly: %s", remote.kind, remote.name, result)
    except TimeoutError:
        kinds = ", ".join(sorted({remote.kind for remote in remotes}))
        logger.warning("%d processes (%s) did not stop within %.0f s and are killed", len(remotes), kinds, STOP_S)
    for remote in remotes:
        remote.kill()


class Stoppable(Protocol):
    """Anything made of processes that a run has to stop."""

    async def stop(self) -> None: ...


async def stop_together(parts: Sequence[Stoppable]) -> None:
    """Stop all of them at once; none keeps the others waiting, and none raises."""
    results = await asyncio.gather(*(part.stop() for part in parts), return_exceptions=True)
    for part, result in zip(parts, results, strict=True):
        if isinstance(result, BaseException):
            logger.warning("%s did not stop cleanly: %s: %s", type(part).__name__, type(result).__name__, result)


def put(group: Group) -> Any:
    """Keep a group where other processes can fetch it, as long as this one lives; returns its handle."""
    return ray.put(group)


def fetch(handles: Sequence[Any]) -> list[Group]:
    """The groups of these handles: from the object store, or from the spool where their process is gone."""
    return fetch_groups(handles, get=ray.get, lost=(ObjectLostError,))


class _Node:
    """What every process answers besides the methods of its object."""

    def node_address(self) -> str:
        """Where other processes of the run reach this machine."""
        return ray.util.get_node_ip_address()


class _Threads(_Node):
    """A process with a loop, which must not wait for plain methods that take long."""

    async def in_thread(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self, method), *args, **kwargs)
