"""An event loop in which waiting costs nothing and nothing depends on the machine.

Time is virtual: it moves to the next timer when nobody can run. One callback runs at a time, each is an *event* with a
number, and work for other threads runs here, in its turn. The same inputs so give the same events, and an event's
number names a moment of a run exactly.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from miles_tito.errors import MilesError

T = TypeVar("T")


class StuckError(MilesError, AssertionError):
    """The run goes on without getting anywhere."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one callback an event."""

    def __init__(
        self,
        *,
        on_event: Callable[[int], None] | None = None,
        disk_s: Callable[[], float] = lambda: 0.0,
        most_events: int = 1_000_000,
        patience_s: float = 10_000.0,
    ) -> None:
        """
        Args:
            on_event: called with the number of each event before it happens.
            disk_s: how long the next piece of work in another thread takes.
            most_events: events after which the run is stuck.
            patience_s: virtual seconds without `progress` after which the run is stuck.
        """
        super().__init__()
        self._now = 0.0
        self._on_event = on_event
        self._disk_s = disk_s
        self._most_events = most_events
        self._patience_s = patience_s
        self._progress_at = 0.0
        self._threads_free_at: dict[int, float] = {}
        self.events = 0
        """Callbacks so far."""
        numbers = itertools.count()
        self.set_task_factory(lambda loop, coro, **kwargs: _Task(coro, loop=loop, number=next(numbers), **kwargs))

    def time(self) -> float:
        return self._now

    def progress(self) -> None:
        """The run got somewhere: patience starts anew."""
        self._progress_at = self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `func` as an event of its own, after a while; work for one executor keeps its order."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return  # its thread had not begun
            try:
                result = func(*args)
            except Exception as error:  # the boundary to the thread: whoever awaits the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        starts = self._now if executor is None else max(self._now, self._threads_free_at.get(id(executor), 0.0))
        ends = starts + self._disk_s()
        if executor is not None:
            self._threads_free_at[id(executor)] = ends
        self.call_at(ends, work)
        return future

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # there is no other thread

    def _process_events(self, event_list: Any) -> None:
        """There are no files to wait for."""

    def _run_once(self) -> None:
        ready: Any = self._ready  # pyright: ignore[reportAttributeAccessIssue]
        timers: Any = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                raise StuckError("Everybody waits and no timer is set: a deadlock.")
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        if not ready:
            return
        self.events += 1
        if self.events > self._most_events:
            raise StuckError(f"{self.events:,} events at {self._now:,.0f} virtual seconds, and no end.")
        if self._now - self._progress_at > self._patience_s:
            raise StuckError(
                f"No step, push or commit for {self._patience_s:,.0f} virtual seconds, at event {self.events:,}."
            )
        if self._on_event is not None:
            self._on_event(self.events)
        handle = ready.popleft()
        if not handle._cancelled:
            handle._run()


class _Task(asyncio.Task[Any]):
    """Sets of tasks have an order that is the same in every process."""

    def __init__(self, coro: Any, *, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` on `loop`; the clocks of `time` are the loop's meanwhile."""
    clocks, began = (time.time, time.monotonic), time.time()
    time.time = lambda: began + loop.time()
    time.monotonic = loop.time
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        time.time, time.monotonic = clocks
        asyncio.set_event_loop(None)
