"""Checkpoints of a run: complete or absent, the newest found by its number, old ones removed.

    checkpoints/step-000012.partial/   trainer/ written by the ranks, state.json
            └─▶ COMPLETE (names and sizes) ─▶ rename ─▶ step-000012/ ─▶ older ones removed

Everything is on the device before the marker is, and the marker before the name. A folder without a marker, with a
file that is shorter than its marker says, or with the name of another step is never loaded; what was left over is
removed when the run starts again. A checkpoint that somebody reads holds a lock that retention respects, also across
processes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from miles_tito.shared.files import sync, write_atomic
from miles_tito.shared.locks import FileLock
from miles_train.errors import CheckpointError

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
STATE = "state.json"
REQUEST = "save_now"
FORMAT = 1

_NAME = re.compile(r"step-(\d+)")
_CANDIDATE = re.compile(r"step-(\d+)(\.partial)?")
_LEFT_OVER = re.compile(r"step-\d+\.(partial|pruned)")


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of one run, written by its driver: `Commits` says when, a resumed run asks for the newest.

    Args:
        folder: `<run>/checkpoints`; other entries in it are left alone.
        keep: complete checkpoints that stay, the newest ones.
        keep_every: those whose step is a multiple of this stay for good.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_every = keep_every
        self._request = folder.parent / REQUEST

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint by number; warns of every newer one that it passes over."""
        complete, skipped = self.scan()
        newest = complete[-1] if complete else None
        for path, reason in skipped:
            if newest is None or _number(path) > newest.step:
                using = f"using {newest.path.name}" if newest else "there is no complete one"
                logger.warning("checkpoint %s is passed over: %s; %s", path.name, reason, using)
        return newest

    def scan(self) -> tuple[list[Checkpoint], list[tuple[Path, str]]]:
        """Complete checkpoints by rising step; and what looks like one but is not, each with the reason."""
        complete: list[Checkpoint] = []
        skipped: list[tuple[Path, str]] = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if not _CANDIDATE.fullmatch(path.name):
                continue
            if (reason := _incomplete(path)) is None:
                complete.append(Checkpoint(_number(path), path))
            else:
                skipped.append((path, reason))
        return sorted(complete), sorted(skipped)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; `complete` or `abandon` comes next.

        Raises:
            CheckpointError: there is one already, or the disk has less room than the newest one takes.
        """
        path = self._path(step)
        if path.exists() and _incomplete(path) is None:
            raise CheckpointError(f"{path} exists already; step {step} cannot be saved twice.")
        partial = _partial(path)
        for left_over in (path, partial):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            self._check_room(step)
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"The checkpoint folder {partial} cannot be made: {error}.") from error
        return partial

    def complete(self, step: int, state: Mapping[str, Any]) -> Path:
        """Add `state`, make everything durable, mark it complete, give it its name, remove old ones.

        Raises:
            CheckpointError: the disk refused; nothing of this checkpoint is left, those before it are untouched.
        """
        path = self._path(step)
        partial = _partial(path)
        try:
            _write(partial / STATE, {"format": FORMAT, "step": step, **state})
            _sync_tree(partial)
            files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
            _write(partial / MARKER, {"step": step, "bytes": sum(files.values()), "files": files})
            partial.rename(path)
            sync(self._folder)
        except OSError as error:
            raise self._failed(step, error) from error
        self._prune()
        return path

    def abandon(self, step: int) -> None:
        """Remove what was begun for `step`."""
        shutil.rmtree(_partial(self._path(step)), ignore_errors=True)

    def clean(self) -> list[Path]:
        """Remove what a process that died left half-written or half-removed; returns what that was."""
        left = [p for p in self._folder.glob("step-*") if _LEFT_OVER.fullmatch(p.name) and p.is_dir()]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
            logger.warning("removed %s, which an earlier process left unfinished", path.name)
        return left

    def load_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What `complete` was given, and `step`.

        Raises:
            CheckpointError: it cannot be read, or a newer Miles wrote it.
        """
        file = checkpoint.path / STATE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. Use an older checkpoint.") from error
        if (kind := state.pop("format", None)) != FORMAT:
            raise CheckpointError(f"{file} has format {kind}; this version of Miles reads format {FORMAT}.")
        return state

    def take_request(self) -> bool:
        """Did somebody ask for a checkpoint with `touch RUN/save_now`? The request is taken: it counts once."""
        try:
            self._request.unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _prune(self) -> None:
        """Remove all but the newest `keep`, those kept for good, and those that somebody reads."""
        complete, _ = self.scan()
        for checkpoint in complete[: -max(self._keep, 1)]:
            if self._keep_every and checkpoint.step and checkpoint.step % self._keep_every == 0:
                continue
            _remove_unless_read(checkpoint.path)

    def _check_room(self, step: int) -> None:
        complete, _ = self.scan()
        if not complete:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = _size(complete[-1].path), shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._no_room(step, f"about {needed:,} bytes are needed and {free:,} are free")

    def _failed(self, step: int, error: OSError) -> CheckpointError:
        size = _size(_partial(self._path(step)))
        self.abandon(step)
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(self._folder).free
            return self._no_room(step, f"it takes over {size:,} bytes, {free:,} are free without it")
        return CheckpointError(f"The checkpoint of step {step} could not be completed: {error}.")

    def _no_room(self, step: int, numbers: str) -> CheckpointError:
        newest = self.scan()[0][-1:]
        kept = f"{newest[0].path.name} stays the newest complete one" if newest else "there is no complete one yet"
        return CheckpointError(
            f"The disk of {self._folder} is full: for the checkpoint of step {step} {numbers}; {kept}. Free space, or "
            f"lower checkpoint.keep ({self._keep}), then resume the run."
        )


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Keep retention away from the checkpoint at `path` while a process of this machine reads it.

    Raises:
        CheckpointError: it is not complete, or has been removed meanwhile.
    """
    try:
        marker = FileLock(path / MARKER, shared=True, create=False, wait=True)
    except OSError as error:
        raise CheckpointError(f"There is no complete checkpoint at {path} any more: {error}.") from error
    with marker:
        if not (path / MARKER).exists():
            raise CheckpointError(f"The checkpoint {path} was removed before it could be read.")
        yield path


def _remove_unless_read(path: Path) -> None:
    try:
        with FileLock(path / MARKER, create=False):
            going = path.rename(path.with_name(path.name + ".pruned"))
    except BlockingIOError:
        return  # somebody reads it; it is removed behind the next checkpoint
    except OSError as error:  # the new checkpoint is complete whatever becomes of the old
        logger.warning("the old checkpoint %s cannot be removed: %s", path, error)
        return
    shutil.rmtree(going, ignore_errors=True)


def _incomplete(path: Path) -> str | None:
    """Why `path` is no complete checkpoint, None when it is one."""
    if not _NAME.fullmatch(path.name):
        return "a process died while it was written"
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = dict[str, int](marker["files"])
        sizes = {name: (path / name).stat().st_size for name in files}
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(path)
        return f"it has no {missing}" if path.is_dir() else "it is no folder"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARKER} cannot be read ({error})"
    if marker["step"] != _number(path):
        return f"its {MARKER} is of step {marker['step']}"
    for name, size in files.items():
        if sizes[name] != size:
            return f"{name} has {sizes[name]:,} bytes of {size:,}"
    return None


def _number(path: Path) -> int:
    found = _CANDIDATE.fullmatch(path.name)
    assert found, f"{path} is no candidate"
    return int(found[1])


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=2) + "\n", durable=True)


def _sync_tree(folder: Path) -> None:
    """Files and names of a folder, from the leaves up."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place) / name)
        sync(Path(place))
