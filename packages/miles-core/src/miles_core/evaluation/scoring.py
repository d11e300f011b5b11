"""Every dataset of one evaluation through one set of engines, with its conversations kept for reading; and engines of
its own for that, which load each snapshot of the weights, so that training never waits for them."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_rollout.dispatch import RunGroup
from miles_rollout.evaluate import EvalResult, evaluate
from miles_tito.records import Prompt

from .config import DatasetConfig
from .points import DatasetScore

if TYPE_CHECKING:
    from miles_core.cluster import EvalEngines

logger = logging.getLogger(__name__)


class DatasetScorer:
    """Runs the held-out prompts of every dataset at once on engines that hold the weights to score.

    The evaluators on rollout engines and on engines of their own call it, once a point. The workers' permits bound how
    many episodes run.
    """

    def __init__(
        self,
        datasets: Mapping[str, DatasetConfig],
        *,
        prompts: Mapping[str, Sequence[Prompt]],
        conversations: Path,
        keep: int,
    ) -> None:
        """
        Args:
            prompts: of each dataset.
            conversations: folder for the episodes, one a step in it.
            keep: evaluations whose episodes stay, the newest.
        """
        self._datasets = datasets
        self._prompts = prompts
        self._conversations = conversations
        self._keep = keep
        self._count = 0
        """Evaluations begun: sessions of one that was cancelled must not meet those of the next."""

    async def __call__(self, step: int, run_group_into: Callable[[Path | None], RunGroup]) -> list[DatasetScore]:
        """Score the weights of `step`, which the engines hold.

        Args:
            run_group_into: who runs the groups, given the folder that they are written to.
        """
        self._count += 1
        run_group = run_group_into(self._fresh_folder(step))
        try:
            async with asyncio.TaskGroup() as running:
                tasks = {
                    name: running.create_task(
                        evaluate(
                            self._prompts[name],
                            run_group=run_group,
                            samples_per_prompt=dataset.samples_per_prompt,
                            sampling=dataset.sampling,
                            name=name,
                            tag=f"{step}.{self._count}",
                            success_reward=dataset.success_reward,
                        ),
                        name=f"evaluate {name}",
                    )
                    for name, dataset in self._datasets.items()
                }
        finally:
            self._remove(self._folders()[: -self._keep] if self._keep else self._folders())
        return [self._score(name, step, task.result()) for name, task in tasks.items()]

    def _score(self, name: str, step: int, result: EvalResult) -> DatasetScore:
        prefix = "eval" if name == "eval" else f"eval/{name}"
        reason = ""
        if result.mean is None:
            reason = result.why_failed()
        elif result.versions not in (None, (step, step)):
            low, high = result.versions
            sampled = f"version {low}" if low == high else f"versions {low} to {high}"
            reason = f"its tokens were sampled by {sampled} of the weights, not by {step}"
        if reason:
            return DatasetScore(
                dataset=name, score=None, metrics={f"{prefix}/failed": result.metrics()["eval/failed"]}, reason=reason
            )
        return DatasetScore(
            dataset=name, score=result.mean, metrics=result.metrics(prefix=prefix), text=result.summary()
        )

    def _fresh_folder(self, step: int) -> Path | None:
        """An empty folder for the episodes of this step's evaluation; None where none are kept.

        Those of this and later steps are removed: the run went back, and they belong to weights that are gone.
        """
        self._remove([(number, folder) for number, folder in self._folders() if number >= step])
        return self._conversations / f"step-{step:06d}" if self._keep else None

    def _folders(self) -> list[tuple[int, Path]]:
        """By step, oldest first."""
        found = (p for p in self._conversations.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name))
        return sorted((int(path.name.removeprefix("step-")), path) for path in found)

    def _remove(self, folders: Sequence[tuple[int, Path]]) -> None:
        for _, folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


class DedicatedScorer:
    """Scores snapshots on `EvalEngines`: starts them with the first one, and anew after an evaluation that failed."""

    def __init__(self, scorer: DatasetScorer, *, serving: Callable[[], EvalEngines]) -> None:
        """
        Args:
            serving: makes the engines and what belongs to them; called again after a failure.
        """
        self._scorer = scorer
        self._make = serving
        self._serving: EvalEngines | None = None

    async def __call__(self, step: int, snapshot: Path) -> Sequence[DatasetScore]:
        try:
            if self._serving is None:
                self._serving = self._make()
                await self._serving.start()
            await self._serving.load(snapshot, step)
            scores = await self._scorer(step, self._serving.run_group_into)
        except BaseException:  # timeouts too: what did not answer in time may never
            await self.close()
            raise
        if all(part.score is None for part in scores):
            logger.warning("no dataset has a score: the engines of the evaluation are started anew for the next one")
            await self.close()
        return scores

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()
