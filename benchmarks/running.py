"""Runs of `miles` for benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def run_miles(words: Sequence[str], *, out: Path, name: str) -> Path:
    """Run the command; its run directory. Its output goes to a file beside it."""
    out.mkdir(parents=True, exist_ok=True)
    console = ("--run.dir", str(out), "--run.name", name, "--monitor.console", "plain")
    taken = set(out.iterdir())
    with (out / f"{name}.txt").open("w") as log:
        status = subprocess.run(
            [sys.executable, "-m", "miles_core", *words, *console],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status:
        raise SystemExit(f"{name} ended with status {status}; see {out / name}.txt")
    return next(path for path in out.iterdir() if path.is_dir() and path not in taken)
