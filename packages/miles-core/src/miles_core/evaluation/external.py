"""Evaluation by code of the user's: a function or a command that gets a snapshot of the weights and gives metrics."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_rollout.engines.process import OwnedProcess
from miles_tito.errors import MilesError

from .config import is_import_string
from .points import DatasetScore

POLL_S = 0.5
GRACE_S = 3.0
"""Between the request to end and the kill of one that ran out of time."""
DATASET = "external"
"""Names the result in the ledger."""


class ExternalEvalError(MilesError, RuntimeError):
    """The external evaluation ended without metrics."""


class ExternalScorer:
    """Scores a snapshot by the user's function or command, in a process that a timeout can kill with all it started."""

    def __init__(self, target: str, *, log: Callable[[int], Path]) -> None:
        """
        Args:
            target: import string `module:function`, or a command line with `{checkpoint}`.
            log: file for the output of the evaluation of a step.
        """
        self._target = target
        self._log = log

    async def __call__(self, step: int, snapshot: Path) -> Sequence[DatasetScore]:
        process = OwnedProcess(command(self._target, snapshot, step), log_path=self._log(step))
        try:
            while (status := await asyncio.to_thread(process.wait, POLL_S)) is None:
                pass
            metrics = read_metrics(process.log_tail(), status=status)
        finally:
            await asyncio.to_thread(process.stop, grace_s=GRACE_S)
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        return [
            DatasetScore(
                dataset=DATASET,
                score=metrics.get("score"),
                metrics={f"eval/{name}": value for name, value in metrics.items()},
                reason="" if "score" in metrics else "its metrics hold no `score`",
                text=f"external: {text}",
            )
        ]

    async def close(self) -> None:
        """A process ends with its call."""


def command(target: str, snapshot: Path, step: int) -> list[str]:
    """The words to run for one evaluation."""
    if is_import_string(target):
        return [sys.executable, "-m", "miles_core.evaluation.call", target, str(snapshot), str(step)]
    return [word.replace("{checkpoint}", str(snapshot)).replace("{step}", str(step)) for word in shlex.split(target)]


def read_metrics(output: str, *, status: int) -> dict[str, float]:
    """The JSON object in the last line of `output` that holds one.

    Raises:
        ExternalEvalError: the process failed, or there is no such line, or a value is no finite number.
    """
    lines = output.splitlines()
    if status:
        raise ExternalEvalError(f"exit status {status}: {lines[-1] if lines else 'no output'}")
    found = next((table for line in reversed(lines) if (table := _table(line)) is not None), None)
    if found is None:
        raise ExternalEvalError(f"no line of its output is a JSON object; the last is {lines[-1] if lines else ''!r}")
    bad = [name for name, value in found.items() if not _is_number(value)]
    if bad:
        raise ExternalEvalError(f"`{bad[0]}` is {found[bad[0]]!r}; a metric is a finite number")
    return {name: float(value) for name, value in found.items()}


def _table(line: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
