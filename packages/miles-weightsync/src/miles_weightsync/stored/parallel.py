"""Work on many parts in a few threads, with a bound on the bytes in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 8


def each(work: Callable[[T], R], items: Iterable[T], *, nbytes: Callable[[T], int], limit: int) -> list[R]:
    """`[work(item) for item in items]`, several at a time.

    An item begins when it and those that run have at most `limit` bytes; a larger one runs alone. After the first
    that raises no other one begins, and its error is raised.
    """
    started: list[Future[R]] = []
    running: dict[Future[R], int] = {}
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weightsync store") as pool:
        for item in items:
            size = nbytes(item)
            while running and (len(running) == NUM_THREADS or sum(running.values()) + size > limit):
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[done]
                    done.result()
            future = pool.submit(work, item)
            running[future] = size
            started.append(future)
    return [future.result() for future in started]
