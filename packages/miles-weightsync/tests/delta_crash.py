"""Kills a publishing process at every step of it, and looks at what the store holds afterwards.

    python delta_crash.py FOLDER      prints how many steps were tried

Every call that changes the file system is a step, and so is the middle of every write. Each attempt runs in a forked
child that kills itself, on a copy of a store with two versions.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from miles_weightsync.delta import DeltaStore, encode

_CALLS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync")


def version(number: int) -> dict[str, np.ndarray]:
    """Three arrays of a version; each differs a little from those of the version before."""
    arrays = {f"rank{rank}.weight": np.arange(400, dtype=np.uint16) * (rank + 1) for rank in range(3)}
    for past in range(1, number + 1):
        for array in arrays.values():
            array[np.random.default_rng(past).integers(0, array.size, 20)] += 1
    return arrays


def publish(store: DeltaStore, number: int, *, full: bool) -> None:
    new = version(number)
    if full:
        store.publish(number, [store.put_full(number, name, array) for name, array in new.items()], kind="full")
    else:
        old = version(number - 1)
        parts = [store.put_delta(number, name, encode(old[name], array)) for name, array in new.items()]
        store.publish(number, parts, kind="delta", base=number - 1)


def check(store: DeltaStore, number: int) -> None:
    chain = store.chain(None, number)
    for name, array in version(number).items():
        assert np.array_equal(store.restore(chain, name), array), f"version {number} of {name}"


class Steps:
    """Counts steps, and kills this process at the one asked for."""

    def __init__(self, fatal: int | None) -> None:
        self.taken, self._fatal = 0, fatal

    def step(self) -> None:
        if self.taken == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += 1

    def install(self, store: DeltaStore) -> None:
        for name in _CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        filesystem = store._files._fs
        plain_open = filesystem.open
        filesystem.open = lambda path, mode="rb", **kw: _Halves(plain_open(path, mode, **kw), self)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return call(*args, **kwargs)

        return counted


class _Halves:
    """A file that may die in the middle of a write."""

    def __init__(self, file: Any, steps: Steps) -> None:
        self._file, self._steps = file, steps

    def __enter__(self) -> _Halves:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._steps.step()
        self._file.write(data[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def attempt(folder: Path, fatal: int | None, *, full: bool) -> int:
    """Publish version 3 and prune in a child; returns the steps taken, or -1 if it was killed."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        store, steps = DeltaStore(str(folder)), Steps(fatal)
        steps.install(store)
        publish(store, 3, full=full)
        store.prune()
        os.write(sending, str(steps.taken).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(sending)
    answer = os.read(receiving, 16)
    os.close(receiving)
    if fatal is None:
        assert os.waitstatus_to_exitcode(status) == 0
        return int(answer)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"step {fatal} was not reached"
    return -1


def try_all(root: Path, *, full: bool) -> int:
    start = root / "start"
    publish(DeltaStore(str(start)), 1, full=True)
    publish(DeltaStore(str(start)), 2, full=False)
    shutil.copytree(start, root / "dry")
    total = attempt(root / "dry", None, full=full)
    for fatal in range(total):
        folder = root / f"step{fatal}"
        shutil.copytree(start, folder)
        attempt(folder, fatal, full=full)
        store = DeltaStore(str(folder))  # as another process finds it
        served = store.latest()
        assert served in (2, 3), f"after step {fatal}: {store.versions()}"
        check(store, served)
        publish(store, 3, full=full)  # the same again: goes on where it was
        check(store, 3)
        publish(store, 4, full=False)
        check(store, 4)
        store.prune()
        check(store, 4)
        left = {path.name for path in (folder / "parts").rglob("*") if path.is_file()}
        listed = {Path(part.file).name for v in store.versions() for part in store.manifest(v).parts}
        assert left == listed, f"after step {fatal}: {left ^ listed} is left"
        assert {path.suffix for path in (folder / "manifests").iterdir()} == {".json"}
        shutil.rmtree(folder)
    return total


if __name__ == "__main__":
    os.fsync = lambda _: None  # a killed process loses nothing that the kernel has; a step all the same
    place = Path(sys.argv[1])
    print(try_all(place / "full", full=True), try_all(place / "delta", full=False))
