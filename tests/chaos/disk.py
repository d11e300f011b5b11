"""The disk of a process that is about to die or to fill up: every write goes through here.

Installed in a process of its own, it replaces the functions that write, for Python and for SQLite, until the process
ends.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from typing import Any, NoReturn

from .world import World

KILLS = ("kill_before_write", "kill_in_write", "kill_after_write")
AREAS = {"trajectories/": "spool", "metrics.jsonl": "metrics", "checkpoints/": "checkpoint", "ledger.db": "ledger"}
"""Part of a path -> which disk it is on."""
KILLED = 137
"""Exit status of a killed process."""

_real_write, _real_close = os.write, os.close


class Disk:
    """Counts writes; kills the process at one, or refuses all of an area from one on."""

    def __init__(self, world: World, *, run_dir: str) -> None:
        self._world = world
        self._run_dir = run_dir
        self._full: set[str] = set()

    def install(self) -> None:
        os.write = self._write
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._wrapped(getattr(os, name), lambda fd, *_: _path(fd)))
        for name in ("replace", "rename", "truncate", "ftruncate", "unlink", "mkdir"):
            setattr(os, name, self._wrapped(getattr(os, name), lambda path, *_, **__: _path(path)))
        connect, disk = sqlite3.connect, self

        class Connection(sqlite3.Connection):
            """Its commits are writes."""

            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
                if sql != "COMMIT":
                    return super().execute(sql, *args)
                if disk._is_full("ledger"):
                    raise sqlite3.OperationalError("database or disk is full")
                execute = super().execute
                return disk._killable("ledger.db", lambda: execute(sql), half=None)

        sqlite3.connect = lambda *args, **kwargs: connect(*args, **{"factory": Connection, **kwargs})

    def _write(self, fd: int, content: Any) -> int:
        path = _path(fd)
        if not path.startswith(self._run_dir):
            return _real_write(fd, content)
        half = memoryview(content)[: len(content) // 2]
        area = _area(path)
        was_full = area in self._full
        if area is not None and self._is_full(area):
            if was_full or not half:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return _real_write(fd, half)  # what still fits
        return self._killable(path, lambda: _real_write(fd, content), half=lambda: _real_write(fd, half))

    def _is_full(self, area: str) -> bool:
        if area not in self._full and self._world.fault(f"full_{area}") is not None:
            self._full.add(area)
        return area in self._full

    def _wrapped(self, real: Callable[..., Any], path_of: Callable[..., str]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args, **kwargs)
            if not path.startswith(self._run_dir):
                return real(*args, **kwargs)
            return self._killable(path, lambda: real(*args, **kwargs), half=None)

        return wrapper

    def _killable(self, path: str, write: Callable[[], Any], *, half: Callable[[], Any] | None) -> Any:
        fault = self._world.fault(*KILLS)
        if fault is not None and fault.kind == "kill_in_write" and half is not None:
            half()
        if fault is not None and fault.kind != "kill_after_write":
            kill(self._world, path)
        result = write()
        if fault is not None:
            kill(self._world, path)
        return result


def kill(world: World, where: str) -> NoReturn:
    """As `kill -9`: nothing is flushed, nothing is cleaned up."""
    world.record.add("killed", start=world.start, where=where)
    os._exit(KILLED)


def _path(of: Any) -> str:
    return os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else os.fspath(of)


def _area(path: str) -> str | None:
    return next((area for part, area in AREAS.items() if part in path), None)
