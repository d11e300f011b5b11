"""Reinforcement learning: every part started, the loop run, every part stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_rollout.advantages import advantages_by_episode
from miles_rollout.buffer import GroupBuffer
from miles_rollout.evaluate import EvalResult, evaluate
from miles_rollout.producer import Gate, produce
from miles_rollout.prompts import PromptStream
from miles_tito.records import Prompt
from miles_tito.summary import GroupRef
from miles_weightsync.config import PushConfig

from . import loop
from .cluster import Fleet, SessionServers, Trainers, Workers, stop_parts
from .config import Config
from .fate_index import FateIndex
from .metrics import mean
from .model import context_limit
from .monitor import Monitor
from .rundir import RunDir
from .usage import Usage
from .warmup import warm_up

logger = logging.getLogger(__name__)


class RLRun:
    """One RL run inside a running Ray."""

    def __init__(self, config: Config, *, run_dir: RunDir, monitor: Monitor) -> None:
        self._config = config
        self._run_dir = run_dir
        self._monitor = monitor
        self._gate = Gate()
        self._index = FateIndex(run_dir.trajectories)
        self._buffer = GroupBuffer(config.rollout, observer=self._index)
        self._usage: Usage | None = None
        self._evals: list[EvalResult] = []
        self._heldout: list[Prompt] = []
        self._rewards: list[float] = []
        """Of every episode that finished since the last step, whatever became of its group."""
        self.version = 0

    async def run(self) -> None:
        """Start, train, evaluate, stop. Whatever happens, every part that was started is stopped."""
        config, parts = self._config, list[Any]()

        def started(part: Any) -> Any:
            parts.append(part)
            return part

        try:
            trainers = started(Trainers(config.train))
            sessions = started(SessionServers(config.sessions.count))
            workers = started(Workers(config, run_dir=self._run_dir))
            model = await trainers.prepare_model(config.model, self._run_dir.model)
            max_context = context_limit(config.model, model, token_budget=config.train.token_budget)
            fleet = started(self._fleet(model))
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._prepare(trainers, model))
                starting.create_task(self._serve(fleet, sessions, workers, model, max_context))
            async with asyncio.TaskGroup() as running:
                watch = running.create_task(fleet.watch(), name="watch the engines")
                await self._train(trainers, fleet, sessions, workers, model)
                watch.cancel()
        finally:
            try:
                self._buffer.close()
            finally:
                await stop_parts(parts)
                self._index.close()

    def summary(self) -> dict[str, Any]:
        """What the run can say about itself so far: fields of `RunSummary`."""
        counts = self._buffer.counts()
        scores = [result.mean for result in self._evals]
        return {
            "steps": self.version,
            "seconds": self._usage.seconds if self._usage else 0.0,
            "eval_before": scores[0] if scores else None,
            "eval_after": scores[-1] if len(scores) > 1 else None,
            "fates": {
                name: getattr(counts, name)
                for name in ("issued", "trained", "filtered", "stale", "failed", "aborted", "in_flight", "twice")
            },
            **(self._usage.totals() if self._usage else {}),
        }

    def _fleet(self, model: Path) -> Fleet:
        name, engines = next((n, e) for n, e in self._config.engines.items() if e.role == "rollout")
        return Fleet(name, engines, model=model, log=self._run_dir.log)

    def _push_config(self, model: Path) -> PushConfig:
        """`[sync]`, with a place in the run directory for the versions that go over the disk."""
        sync = self._config.sync
        if sync.way != "disk" or sync.disk_dir is not None:
            return sync
        return replace(sync, disk_dir=str(self._run_dir.path / "weights"), disk_template=str(model))

    async def _prepare(self, trainers: Trainers, model: Path) -> None:
        """Warm up if asked to, then load the policy for RL."""
        if self._config.sft.steps:
            model = await warm_up(self._config, trainers=trainers, model=model, run_dir=self._run_dir)
            logger.info("warmed up for %d steps", self._config.sft.steps)
        logger.info("trainers: %s", await trainers.setup(self._config.train, model))

    async def _serve(
        self, fleet: Fleet, sessions: SessionServers, workers: Workers, model: Path, max_context: int
    ) -> None:
        """Engines, then the sessions in front of them, then the workers that use the sessions."""
        await workers.open()  # a wrong import string shows before any engine has started
        await fleet.start()
        logger.info("engines at %s", ", ".join(fleet.urls))
        await sessions.start(
            fleet.url,
            tokenizer=model,
            family=self._config.model.family,
            max_context=max_context,
        )
        await workers.connect(sessions)

    async def _train(
        self, trainers: Trainers, fleet: Fleet, sessions: SessionServers, workers: Workers, model: Path
    ) -> None:
        """Push version 0, then the loop, with evaluations before, during and after it."""
        config = self._config
        await trainers.connect(fleet.urls, self._push_config(model))
        await trainers.push(0)
        logger.info("the engines serve version 0")
        prompts = await workers.prompts(config.env.split, config.env.num_prompts)
        if config.eval.enabled:
            self._heldout = await workers.prompts(config.eval.split, config.eval.num_prompts)
        if config.eval.at_start:
            self._monitor.log(0, await self._evaluate(workers))
        self._usage = Usage(await sessions.counters(), monitor=self._monitor)
        await loop.run(
            produce=partial(
                produce,
                prompts=PromptStream(prompts, seed=config.run.seed),
                buffer=self._buffer,
                run_group=workers.run_group,
                group_size=config.rollout.group_size,
                gate=self._gate,
                spool=self._finished,
            ),
            buffer=self._buffer,
            trainer=trainers,
            sync=trainers,
            advantages=partial(advantages_by_episode, advantage=config.rollout.advantage),
            monitor=self._monitor,
            steps=config.run.steps,
            on_step=partial(self._after_step, sessions, workers),
        )
        self._buffer.close()  # groups that came too late for the last step are aborted, not lost
        if config.eval.at_end and not self._evaluated(self.version):
            self._monitor.log(self.version, await self._evaluate(workers))
        await trainers.export(self._run_dir.checkpoints / "final")

    async def _finished(self, ref: GroupRef) -> None:
        """A group is durable in its worker's spool, and is about to meet the filter."""
        self._rewards += (reward for reward in ref.rewards if reward is not None)
        await self._index.spooled(ref)

    async def _after_step(
        self, sessions: SessionServers, workers: Workers, version: int, metrics: dict[str, float]
    ) -> dict[str, float]:
        self.version = version
        assert self._usage is not None, "the loop runs after _train has made it"
        more = self._usage.step(
            await sessions.counters(), train_seconds=metrics["time/train"], episodes=int(metrics["batch/episodes"])
        )
        more["reward/all_mean"] = mean(self._rewards)
        self._rewards.clear()
        every = self._config.eval.every
        if every and version % every == 0:
            with self._gate.closed():
                more |= await self._evaluate(workers)
        return more

    async def _evaluate(self, workers: Workers) -> dict[str, float]:
        """Score the held-out prompts with the weights that the engines hold now."""
        config, began = self._config.eval, time.time()
        result = await evaluate(
            self._heldout,
            run_group=workers.run_unspooled,
            samples_per_prompt=config.samples_per_prompt,
            sampling=config.sampling,
            tag=str(self.version),
        )
        self._evals.append(result)
        self._monitor.event("evaluate", began, time.time(), "eval")
        logger.info("version %d: %s", self.version, result.summary())
        return result.metrics()

    def _evaluated(self, version: int) -> bool:
        every = self._config.eval.every
        return bool(every) and version > 0 and version % every == 0
