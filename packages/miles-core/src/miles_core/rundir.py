"""What a run leaves behind, and where.

<dir>/<name>/
  config.json  environment.json  metrics.jsonl  trace.json  report.html  ledger.db
  trajectories/   checkpoints/   eval/   log/   sft/
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_tito.errors import MilesError

_PACKAGES = (
    *("miles-core", "miles-tito", "miles-rollout", "miles-envs", "miles-train", "miles-weightsync", "miles-quant"),
    *("torch", "transformers", "sglang", "smg", "ray", "megatron-core", "numpy", "tokenizers"),
)


class RunDirError(MilesError, OSError):
    """The run directory cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths of one run."""

    path: Path

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


def create(base: Path, name: str, *, config: dict[str, Any]) -> RunDir:
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
    run_dir = RunDir(path=path)
    for folder in (run_dir.trajectories, run_dir.checkpoints, run_dir.log):
        folder.mkdir()
    _write_json(path / "config.json", config)
    _write_json(path / "environment.json", environment())
    return run_dir


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")
