"""Reinforcement learning: the loop over the processes of a run, and how it goes on where it stopped.

start ─▶ ┌ load the last commit ─▶ push it ─▶ restore open groups ─▶ loop ┐ ─▶ last evaluation, export ─▶ proof
         └──────────────────── a trainer rank died ◀──────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from miles_rollout.advantages import advantages_by_episode
from miles_rollout.buffer import GroupBuffer
from miles_rollout.fates import Fate, FateEvent
from miles_rollout.producer import Gate, produce
from miles_rollout.prompts import PromptStream
from miles_tito.records.summary import GroupRef
from miles_weightsync.config import PushConfig

from miles_core.cluster import EvalEngines, TrainerLost
from miles_core.config import Config
from miles_core.durable.checkpoints import Checkpoint
from miles_core.durable.fingerprint import fingerprint_prompts
from miles_core.durable.rundir import RunDir
from miles_core.errors import cause
from miles_core.evaluation.build import build_evaluator
from miles_core.evaluation.evaluator import Evaluator
from miles_core.evaluation.points import EvalLog
from miles_core.monitor import Monitor, MultiMonitor
from miles_core.monitor.alarms import Alarms
from miles_core.monitor.metrics import Arrivals
from miles_core.monitor.usage import RunUsage

from . import loop
from .resume_state import resume_state
from .run_state import RunState
from .starting import Started, started

logger = logging.getLogger(__name__)

MAX_TRAINER_RESTARTS = 3
"""In a row without a committed step in between; whatever kills the ranks then goes on doing so."""


class RLRun:
    """One RL run; in a directory that an earlier start left, it goes on from there. `main` makes it and calls `run`."""

    def __init__(self, config: Config, *, run_dir: RunDir, monitor: Monitor, accept_changes: bool = False) -> None:
        """
        Args:
            accept_changes: go on although the model or the data is another than before.
        """
        self._config = config
        self._run_dir = run_dir
        self._state = RunState(config, run_dir=run_dir, accept_changes=accept_changes)
        self._ledger = self._state.ledger
        self._commits = self._state.commits
        self._alarms = Alarms(on_alarm=lambda name, text: self._ledger.event("alarm", name, text))
        self._monitor = MultiMonitor([monitor], [self._alarms] if config.monitor.alarms else [])
        self._usage: RunUsage | None = None
        self._gate = Gate()
        self._evaluator: Evaluator = Evaluator()
        self._eval_log = EvalLog(ledger=self._ledger, monitor=self._monitor, present_step=lambda: self.version)
        self._arrivals = Arrivals()
        self._scores: dict[int, float | None] = {}
        self._fates: dict[str, int] = {}
        self.version = 0

    async def run(self) -> None:
        """Start, train, evaluate, stop. Groups that are open when it ends early stay open, for a resumed run."""
        try:
            self._state.begin()
            async with (
                started(self._config, run_dir=self._run_dir, on_event=self._ledger.event) as run,
                asyncio.TaskGroup() as running,
            ):
                watched = [run.fleet.watch(), self._ledger.watch()]
                if self._config.monitor.alarms:
                    watched.append(self._alarms.watch())
                watches = [running.create_task(watch) for watch in watched]
                try:
                    await self._train_to_the_end(run)
                finally:
                    await self._evaluator.close()
                for watch in watches:
                    watch.cancel()
        finally:
            await self._commits.give_up()
            self._scores = self._ledger.scores()
            self._fates = asdict(self._ledger.counts())
            self._ledger.close()

    def summary(self) -> dict[str, Any]:
        """What the run can say about itself so far: fields of `RunSummary`."""
        scores = [score for score in self._scores.values() if score is not None]
        return {
            "steps": self.version,
            "seconds": self._usage.seconds if self._usage else 0.0,
            "eval_before": scores[0] if scores else None,
            "eval_after": scores[-1] if len(scores) > 1 else None,
            "fates": self._fates,
            **(self._usage.totals() if self._usage else {}),
        }

    # ---- from the last commit to the last step

    async def _train_to_the_end(self, run: Started) -> None:
        """Train; when a trainer rank dies, go on from the last commit with new ranks and the engines that run."""
        restarts, are_lost = 0, False
        self._evaluator = await self._make_evaluator(run)
        while True:
            committed = self._commits.last
            try:
                if are_lost:
                    await run.trainers.restart()
                    await run.trainers.setup(self._config.train, run.policy)
                commit = await self._go_back(run, in_place=are_lost)
                return await self._train(run, commit)
            except Exception as error:
                lost = cause(error)
                restarts = 1 if self._commits.last > committed else restarts + 1
                if not isinstance(lost, TrainerLost) or restarts > MAX_TRAINER_RESTARTS:
                    raise
                logger.warning("%s The trainer goes on from the last commit.", lost)
                self._ledger.event("trainer", "all ranks", f"restarted: {lost}")
            await self._commits.give_up()
            are_lost = True

    async def _go_back(self, run: Started, *, in_place: bool) -> Checkpoint | None:
        """Trainer, evaluations, ledger and monitors to the newest checkpoint, which is returned; else to step 0."""
        commit = await self._state.load(run.trainers)
        step = commit.step if commit else 0
        await self._evaluator.rewind(step)
        self._state.rewind(step, in_place=in_place)
        self._monitor.rewind(step)
        self.version = step
        return commit

    async def _train(self, run: Started, commit: Checkpoint | None) -> None:
        """Push the version that the trainer holds, then the loop, with evaluations before, during and after it."""
        config, rollout = self._config, self._config.rollout
        await run.trainers.connect(run.fleet.urls, self._push_config(run))
        push = partial(run.trainers.push, engines=run.fleet.supervisor)
        await push(self.version)
        logger.info("the engines serve version %d", self.version)
        prompts = await run.workers.prompts(config.env.split, config.env.num_prompts)
        self._commits.check_unchanged(commit, model=run.policy, prompts=fingerprint_prompts(prompts))
        stream = PromptStream(prompts, seed=config.run.seed)
        stream.restore({**stream.state(), "drawn": self._ledger.drawn()})
        resume = resume_state(self._ledger, trajectories=self._run_dir.trajectories, prompts=prompts)
        buffer = GroupBuffer(rollout, observer=self._observe, version=self.version)
        buffer.restore(resume)
        is_start = not self.version and config.eval.at_start
        if (is_start or config.eval.is_due(self.version)) and (metrics := await self._evaluate()):
            self._monitor.log_late(self.version, metrics)
        if self._usage is None:
            self._usage = RunUsage(await run.sessions.counters(), monitor=self._monitor)
        if commit is None:
            await self._state.commit(run.trainers, 0)  # a run that dies in its first steps goes on from here
        advantages = partial(advantages_by_episode, advantage=rollout.advantage)
        try:
            await loop.run(
                produce=partial(
                    produce,
                    prompts=stream,
                    buffer=buffer,
                    run_group=run.workers.run_group,
                    group_size=rollout.group_size,
                    gate=self._gate,
                    spool=self._finished,
                    resume=resume,
                ),
                buffer=buffer,
                train=partial(run.trainers.train, advantages=advantages),
                push=push,
                monitor=self._monitor,
                steps=config.run.steps,
                on_step=partial(self._after_step, run),
            )
        finally:
            buffer.close()
        await self._end(run)

    async def _end(self, run: Started) -> None:
        """Every step is trained: nothing stays open, and the run proves it."""
        await self._evaluator.drain()
        if self._config.eval.at_end and (metrics := await self._evaluate()):
            self._monitor.log_late(self.version, metrics)
        await self._evaluator.drain()
        await self._commits.drain()
        self._ledger.abort_open("run ended")  # too late for the last step, which no rewind takes back any more
        await run.trainers.export(self._run_dir.checkpoints / "final")
        self._ledger.require_sound()

    # ---- called by the loop

    def _observe(self, event: FateEvent) -> None:
        """Aborted means here that this process stops: whether the group is over, the end of the run decides."""
        if event.fate is not Fate.ABORTED:
            self._ledger(event)

    async def _finished(self, ref: GroupRef) -> None:
        """A group is durable in its worker's spool, and is about to meet the filter."""
        self._arrivals.add(ref)
        self._ledger.finished(ref)

    async def _after_step(
        self, run: Started, version: int, groups: Sequence[GroupRef], metrics: dict[str, float]
    ) -> dict[str, float]:
        self.version = version
        self._ledger.step(version, groups, facts={"seconds": metrics["time/step"]})
        await self._commits.check()
        assert self._usage is not None, "the loop runs after _train has made it"
        more = self._usage.step(
            await run.sessions.counters(), train_seconds=metrics["time/train"], episodes=int(metrics["batch/episodes"])
        )
        more |= self._arrivals.metrics() | run.fleet.supervisor.metrics()
        if self._config.eval.is_due(version):
            more |= await self._evaluate()
        # Nothing may be awaited behind this: a step that is committed has its row in the metrics.
        if self._commits.is_due(version, is_last=version == self._config.run.steps):
            more |= await self._state.commit(run.trainers, version)
        return more

    async def _evaluate(self) -> dict[str, float]:
        """Have the present weights evaluated, unless they have a score already."""
        if self._ledger.scores().get(self.version) is not None:
            return {}
        return await self._evaluator.begin(self.version)

    async def _make_evaluator(self, run: Started) -> Evaluator:
        return await build_evaluator(
            self._config.eval,
            run_dir=self._run_dir,
            log=self._eval_log,
            monitor=self._monitor,
            gate=self._gate,
            idle=run.workers.idle,
            prompts=run.workers.prompts,
            run_group_into=run.workers.evaluate_into,
            export=run.trainers.export_serving,
            serving=lambda: EvalEngines(
                self._config, run_dir=self._run_dir, model=run.model, on_event=self._ledger.event
            ),
        )

    def _push_config(self, run: Started) -> PushConfig:
        """`[sync]`, with a place in the run directory for the versions that go over the disk."""
        sync = self._config.sync
        if self._config.quant is not None and self._config.quant.quantize_activations:
            sync = replace(sync, dtype="keep")  # codes and scales are not to be cast
        if sync.way != "disk" or sync.disk_dir is not None:
            return sync
        return replace(sync, disk_dir=str(self._run_dir.path / "weights"), disk_template=str(run.model))
