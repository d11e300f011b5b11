"""Supervised training through the same loop: demonstrations instead of rollouts, no engine to update."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_rollout.buffer import GroupBuffer
from miles_rollout.config import RolloutConfig
from miles_rollout.producer import produce
from miles_rollout.prompts import PromptStream
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef
from miles_train import SftLoss, TrainConfig

from miles_core.cluster import Remote, TrainerRanks, stop_together
from miles_core.cluster.remote import put
from miles_core.config import Config
from miles_core.durable.checkpoints import Checkpoint, Checkpoints
from miles_core.durable.rundir import RunDir
from miles_core.monitor import JsonlMonitor, Monitor, RunSummary

from . import loop
from .commits import TRAINER, Commits
from .demonstrations import SupervisedSource, imitate


class SftRun:
    """Supervised training as the whole job, `miles sft`; `main` makes it and calls `run`.

    In a directory that an earlier start left, it goes on from there.
    """

    def __init__(self, config: Config, *, run_dir: RunDir, monitor: Monitor, accept_changes: bool = False) -> None:
        """
        Args:
            accept_changes: go on although the model or the data is another than before.
        """
        self._config = config
        self._run_dir = run_dir
        self._monitor = monitor
        self._checkpoints = Checkpoints(
            run_dir.checkpoints, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every
        )
        self._commits = Commits(config.checkpoint, checkpoints=self._checkpoints, accept_changes=accept_changes)
        self._began = time.monotonic()
        self._steps = 0

    async def run(self) -> None:
        """Train, export to `checkpoints/final`, stop."""
        self._checkpoints.clean()
        found = self._checkpoints.latest()
        self._steps = found.step if found else 0
        trainers = TrainerRanks(self._config.train, self._config.quant)
        try:
            model = await trainers.prepare_model(self._config.model, self._run_dir.model)
            await train_supervised(
                self._config,
                trainers=trainers,
                model=model,
                monitor=self._monitor,
                on_step=partial(self._after_step, trainers),
                on_data=lambda data: self._commits.check_unchanged(found, model=model, prompts=data),
                found=found,
            )
            await self._commits.drain()
            await trainers.export(self._run_dir.checkpoints / "final")
        finally:
            await self._commits.give_up()
            await stop_together([trainers])

    def summary(self) -> dict[str, Any]:
        return {"steps": self._steps, "seconds": time.monotonic() - self._began}

    async def _after_step(
        self, trainers: TrainerRanks, version: int, groups: Sequence[GroupRef], metrics: dict[str, float]
    ) -> dict[str, float]:
        self._steps = version
        await self._commits.check()
        if not self._commits.is_due(version, is_last=version == self._config.sft.steps):
            return {}
        return await self._commits.begin(version, trainers=trainers, state={"version": version})


def sft_train_config(config: Config) -> TrainConfig:
    """The trainer of `[train]` with the loss of SFT, and the optimizer and schedule of `[sft]`.

    Tokens are averaged over the batch: each one is a demonstration.
    """
    return replace(
        config.train,
        minibatches=1,
        loss=SftLoss(normalization="token", log_entropy=False),
        optimizer=config.sft.optimizer,
        schedule=config.sft.schedule,
    )


async def train_supervised(
    config: Config,
    *,
    trainers: TrainerRanks,
    model: Path,
    monitor: Monitor,
    on_step: loop.OnStep = loop.nothing_more,
    on_data: Callable[[dict[str, Any]], None] | None = None,
    found: Checkpoint | None = None,
) -> None:
    """Train `model` up to step `sft.steps` on `sft.data`, from its beginning or from the checkpoint `found`.

    Args:
        on_data: called with the fingerprint of the demonstrations before anything is trained.
    """
    step, batch_size = found.step if found else 0, config.sft.batch_size
    source = Remote(SupervisedSource, kind="source of demonstrations")
    source.spawn(config.sft, seed=config.run.seed, store=put)
    try:
        opened = source.call("open", tokenizer=model, family=config.model.family, skip=step * batch_size)
        _, data = await asyncio.gather(trainers.setup(sft_train_config(config), model), opened)
        if on_data is not None:
            on_data(data)
        if found:
            await trainers.load(found.path / TRAINER)
        monitor.rewind(step)
        buffer = GroupBuffer(_one_group_a_step(batch_size), version=step)
        await loop.run(
            produce=partial(
                produce,
                prompts=PromptStream(_draws()),
                buffer=buffer,
                run_group=partial(source.call, "group"),
                group_size=batch_size,
            ),
            buffer=buffer,
            train=partial(trainers.train, advantages=imitate),
            push=None,
            monitor=monitor,
            steps=config.sft.steps,
            on_step=on_step,
        )
        buffer.close()
    finally:
        source.kill()


async def warm_up(config: Config, *, trainers: TrainerRanks, model: Path, run_dir: RunDir, out: Path) -> None:
    """Supervised training before RL: the same ranks, the same loop, its own metrics under `<run>/sft/`.

    Trains `sft.steps` steps on demonstrations; the warmed-up model appears whole at `out`.
    """
    shutil.rmtree(run_dir.sft, ignore_errors=True)  # of a start that was killed before it was done
    run_dir.sft.mkdir()
    monitor = JsonlMonitor(run_dir.sft)
    began = time.monotonic()
    await train_supervised(config, trainers=trainers, model=model, monitor=monitor)
    await trainers.export(out)
    monitor.finish(RunSummary(status="finished", steps=config.sft.steps, seconds=time.monotonic() - began))


def _one_group_a_step(batch_size: int) -> RolloutConfig:
    """Two groups ahead of training; age does not matter, for nothing was sampled."""
    return RolloutConfig(
        group_size=batch_size,
        groups_per_step=1,
        max_staleness=2,
        min_rewards=1,
        advantage="reinforce_pp",
        filter="no_filter",
        put_policy="keep",
        take_policy="keep",
    )


def _draws() -> Iterator[Prompt]:
    """Names for the draws; what is drawn, the source decides."""
    return (Prompt(id=f"demonstrations-{number}") for number in itertools.count())
