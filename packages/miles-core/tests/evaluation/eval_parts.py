"""Scripted parts of an evaluation: a ledger, a monitor, workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core_records import make_group
from miles_core.evaluation.config import DatasetConfig
from miles_core.evaluation.points import EvalLog
from miles_core.evaluation.scoring import DatasetScorer
from miles_rollout.dispatch import GroupRequest
from miles_tito.records import Prompt, Sampling
from miles_tito.records.summary import GroupRef, summarize


class Told:
    """Ledger and monitor in one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.late: list[tuple[int, dict[str, float]]] = []
        self.spans: list[str] = []
        self.full = False

    def evaluated(self, dataset: str, **facts: Any) -> None:
        if self.full:
            raise OSError("no space left for the ledger")
        self.rows.append({"dataset": dataset, **facts})

    def event(self, name: str, start: float, end: float, lane: str) -> None:
        self.spans.append(name)

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        self.late.append((step, dict(metrics)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("rows of steps are the loop's")

    def finish(self, summary: object) -> None:
        raise AssertionError("the run ends elsewhere")

    def reasons(self) -> list[str]:
        return [row["reason"] for row in self.rows]


class ScriptedEngines:
    """Runs groups: the rewards of each prompt from `play`, the version that it says it holds."""

    def __init__(self, play: Callable[[str], Sequence[float | None]] = lambda prompt: (0.0, 1.0)) -> None:
        self.play = play
        self.version = 0
        self.seconds = 1.0
        self.broken: Exception | None = None
        self.groups: list[str] = []
        self.samplings: list[Sampling | None] = []
        self.folders: list[Path | None] = []
        self.running = 0
        self.most_running = 0
        self._ended = asyncio.Event()

    async def idle(self) -> None:
        """As the workers of training wait for their groups."""
        await asyncio.sleep(0)
        while self.running:
            await self._ended.wait()

    def into(self, folder: Path | None) -> ScriptedEngines:
        self.folders.append(folder)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __call__(self, request: GroupRequest) -> GroupRef:
        self.groups.append(request.group_id)
        self.samplings.append(request.sampling)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
            if self.broken is not None:
                raise self.broken
            rewards = self.play(request.prompt.id)[: request.group_size]
            return summarize(make_group(request.group_id, [[4]] * len(rewards), rewards, version=self.version))
        finally:
            self.running -= 1
            self._ended.set()
            self._ended = asyncio.Event()


def make_log(told: Told, *, present: Callable[[], int] = lambda: 0) -> EvalLog:
    return EvalLog(ledger=told, monitor=told, present_step=present)  # pyright: ignore[reportArgumentType]


def make_scorer(tmp_path: Path, *, keep: int = 2, **datasets: DatasetConfig) -> DatasetScorer:
    datasets = datasets or {"eval": DatasetConfig(samples_per_prompt=2)}
    return DatasetScorer(
        datasets,
        prompts={name: [Prompt(id=f"{name}-{i}") for i in range(3)] for name in datasets},
        conversations=tmp_path / "eval",
        keep=keep,
    )
