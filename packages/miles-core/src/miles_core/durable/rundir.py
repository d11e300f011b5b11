"""What a run leaves behind, and where.

<dir>/<name>/
  config.json  run.json  environment.json  metrics.jsonl  trace.json  report.html  ledger.db  run.lock
  trajectories/   checkpoints/   eval/   log/   sft/
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from miles_tito.errors import MilesError
from miles_tito.shared.files import write_atomic
from miles_tito.shared.locks import FileLock

_PACKAGES = (
    *("miles-core", "miles-tito", "miles-rollout", "miles-envs", "miles-train", "miles-weightsync", "miles-quant"),
    *("torch", "transformers", "sglang", "smg", "ray", "megatron-core", "numpy", "tokenizers"),
)

CONFIG = "config.json"
FACTS = "run.json"
LOCK = "run.lock"

Kind = Literal["rl", "sft"]
T = TypeVar("T")


class RunDirError(MilesError, OSError):
    """The run directory cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a run is beside its configuration."""

    kind: Kind
    import_paths: tuple[str, ...] = ()
    """Where the user's modules were looked for when the run was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths of one run."""

    path: Path
    lock: FileLock | None = None
    """Held by the process that runs it; none for one that only looks."""

    def facts(self) -> Facts:
        """What `create` was given.

        Raises:
            RunDirError: the file is missing or damaged.
        """
        restored = 'it says {"kind": "rl" or "sft", "import_paths": [folders of your modules]}'
        return self._decoded(FACTS, Facts, restored)

    def config(self) -> dict[str, Any]:
        """The resolved configuration, as plain data that nobody has checked.

        Raises:
            RunDirError: the file is missing, damaged, or no table.
        """
        return self._decoded(CONFIG, dict[str, Any], "its checkpoints and its ledger do not depend on it")

    def _decoded(self, name: str, wanted: type[T], restored: str) -> T:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=wanted)
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"{self.path / name} cannot be read: {error}. Restore it from a copy of the run; {restored}."
            ) from error

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def evaluations(self) -> Path:
        """Conversations of the newest evaluations, and snapshots that are being evaluated."""
        return self.path / "eval"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def model(self) -> Path:
        """The model folder, where a builder made one."""
        return self.path / "model"

    @property
    def sft(self) -> Path:
        return self.path / "sft"


def create(
    base: Path, name: str, *, config: dict[str, Any], kind: Kind = "rl", import_paths: Sequence[str] = ()
) -> RunDir:
    """Make a fresh directory for a run: `name`, or `name-2`, `name-3`, … where that one is taken.

    Nothing is ever overwritten: a directory belongs to the run that made it.
    """
    base = base.expanduser().resolve()
    number = 1
    while True:
        path = base / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunDirError(f"Cannot create the run directory {path}: {error}. Set `run.dir`.") from error
    run_dir = RunDir(path=path, lock=_lock(path))
    for folder in (run_dir.trajectories, run_dir.checkpoints, run_dir.log):
        folder.mkdir()
    _write_json(path / FACTS, {"kind": kind, "import_paths": list(import_paths)})
    _write_json(path / "environment.json", environment())
    write_config(run_dir, config)  # last: with it the directory is a run
    return run_dir


def open_run(path: Path) -> RunDir:
    """The directory of a run that is to go on.

    Raises:
        RunDirError: it is none, or another process runs it.
    """
    path = path.expanduser().resolve()
    if not (path / CONFIG).is_file():
        raise RunDirError(f"{path} is no run: it has no {CONFIG}. Name the directory that `miles rl` made.")
    return RunDir(path=path, lock=_lock(path))


def write_config(run_dir: RunDir, config: dict[str, Any]) -> None:
    """Store the resolved configuration; the one before stays whole until the new one is."""
    _write_json(run_dir.path / CONFIG, config)


def environment() -> dict[str, Any]:
    """Versions, machine and command of this process."""
    return {
        "command": sys.argv,
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lock(run: Path) -> FileLock:
    """Keeps every other process from running in the same directory."""
    path = run / LOCK
    try:
        lock = FileLock(path)
    except BlockingIOError as error:
        raise RunDirError(
            f"{run} is in use: {_holder(path)} runs it. Stop that one first, or wait for its end."
        ) from error
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    path.write_text(json.dumps(holder), encoding="utf-8")
    return lock


def _holder(path: Path) -> str:
    try:
        known = json.loads(path.read_bytes())
        return f"process {known['pid']} on {known['host']}, since {known['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=2, default=str) + "\n")
