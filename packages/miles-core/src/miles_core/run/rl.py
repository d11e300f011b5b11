"""Reinforcement learning: the loop over parts that run, and how it is taken up again where it stopped.

parts ─▶ ┌ load the last commit ─▶ push it ─▶ take up open groups ─▶ loop ┐ ─▶ last evaluation, export ─▶ proof
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
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef
from miles_weightsync.config import PushConfig

from miles_core.actors.rollout_worker import MAX_LOSSES
from miles_core.config import Config
from miles_core.durable.checkpoints import Checkpoint, Checkpoints
from miles_core.durable.commits import Commits
from miles_core.durable.fingerprint import compare, fingerprint_model, fingerprint_prompts
from miles_core.durable.ledger import Ledger, Limits
from miles_core.durable.rundir import RunDir, environment
from miles_core.errors import cause
from miles_core.evaluation.build import build_evaluator
from miles_core.evaluation.evaluator import Evaluator
from miles_core.evaluation.points import EvalLog
from miles_core.evaluation.shared import InFlight
from miles_core.monitor import Monitor, MultiMonitor
from miles_core.monitor.alarms import Alarms
from miles_core.monitor.metrics import Arrivals
from miles_core.monitor.usage import RunUsage
from miles_core.parts import Parts, TrainerLost

from . import loop
from .resume import ResumeError, refuse
from .starting import Started, started
from .takeup import take_up

logger = logging.getLogger(__name__)

MAX_TRAINER_RESTARTS = 3
"""In a row without a committed step in between; whatever kills the ranks then goes on doing so."""


class RLRun:
    """One RL run over the given parts; in a directory that an earlier start left, it goes on from there."""

    def __init__(
        self, config: Config, *, run_dir: RunDir, monitor: Monitor, parts: Parts, accept_changes: bool = False
    ) -> None:
        """
        Args:
            accept_changes: go on although the model or the data is another than before.
        """
        self._config = config
        self._accept_changes = accept_changes
        self._run_dir = run_dir
        self._alarms = Alarms(on_alarm=lambda name, text: self._ledger.event("alarm", name, text))
        self._monitor = MultiMonitor([monitor], [self._alarms] if config.monitor.alarms else [])
        self._parts = parts
        self._gate = Gate()
        self._ledger = Ledger.open(run_dir.ledger, create=True)
        self._checkpoints = Checkpoints(
            run_dir.checkpoints, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every
        )
        self._commits = Commits(config.checkpoint, checkpoints=self._checkpoints, ledger=self._ledger)
        self._usage: RunUsage | None = None
        self._evaluator: Evaluator = Evaluator()
        self._eval_log = EvalLog(ledger=self._ledger, monitor=self._monitor, present_step=lambda: self.version)
        self._arrivals = Arrivals()
        self._scores: dict[int, float | None] = {}
        self._fates: dict[str, int] = {}
        self._fingerprint: dict[str, Any] = {}
        self.version = 0

    async def run(self) -> None:
        """Start, train, evaluate, stop. Groups that are open when it ends early stay open, for a resumed run."""
        try:
            self._begin()
            self._parts.tell(self._ledger.event)
            async with (
                started(self._config, run_dir=self._run_dir, parts=self._parts) as run,
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
            await self._commits.forget()
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

    def _begin(self) -> None:
        """A new start in the ledger: of a new run, or from the newest committed step of an old one."""
        rollout = self._config.rollout
        self._checkpoints.clean()
        found = self._checkpoints.latest()
        self._check_commits(found.step if found else 0)
        recovered = self._ledger.recover_spooled(self._run_dir.trajectories)
        start = self._ledger.start(
            None if self._ledger.is_new else found.step if found else 0,
            limits=Limits(
                max_staleness=None if rollout.trains_stale_groups else rollout.max_staleness,
                credits=rollout.num_credits,
                retries=MAX_LOSSES * (rollout.retries + 1) - 1,
            ),
            info=environment(),
        )
        if start:
            step = found.step if found else 0
            logger.info("start %d goes on from step %d; %d groups were on disk alone", start, step, recovered)

    def _check_commits(self, step: int) -> None:
        """What the ledger calls committed must be there: going on from less would undo it without a word."""
        if step >= (committed := self._ledger.last_commit()):
            return
        lost = (
            f"Step {committed} is committed, but the newest complete checkpoint in {self._run_dir.checkpoints} is of "
            f"step {step}: {committed - step} committed steps would be undone."
        )
        if not self._accept_changes:
            raise ResumeError(
                f"{lost} Bring the missing checkpoint back, or say --accept-changes to train those steps again."
            )
        logger.warning("accepted: %s", lost)

    async def _train_to_the_end(self, run: Started) -> None:
        """Train; when a trainer rank dies, go on from the last commit with new ranks and the engines that run."""
        restarts, are_lost = 0, False
        in_flight = InFlight(run.workers.run_group)
        self._evaluator = await self._make_evaluator(run, in_flight)
        while True:
            committed = self._commits.last
            try:
                if are_lost:
                    await run.trainers.restart()
                    await run.trainers.setup(self._config.train, run.policy)
                commit = await self._go_back(run, in_place=are_lost)
                return await self._train(run, in_flight, commit)
            except Exception as error:
                lost = cause(error)
                restarts = 1 if self._commits.last > committed else restarts + 1
                if not isinstance(lost, TrainerLost) or restarts > MAX_TRAINER_RESTARTS:
                    raise
                logger.warning("%s The trainer goes on from the last commit.", lost)
                self._ledger.event("trainer", "all ranks", f"restarted: {lost}")
            await self._commits.forget()
            are_lost = True

    async def _go_back(self, run: Started, *, in_place: bool) -> Checkpoint | None:
        """Trainer, ledger and monitors to the newest checkpoint, which is returned; without one, to step 0.

        Args:
            in_place: this process trained before; a new one is where it is by `_begin`.
        """
        found = self._checkpoints.latest()
        step = found.step if found else 0
        if found:
            await self._commits.load(found.path, run.trainers)
        await self._evaluator.rewind(step)
        returned = self._ledger.rewind(step) if in_place else 0
        self._monitor.rewind(step)
        self.version = self._commits.last = step
        if returned:
            logger.info("back at step %d: %d groups trained after it return to the buffer", step, returned)
        return found

    async def _train(self, run: Started, in_flight: InFlight, commit: Checkpoint | None) -> None:
        """Push the version that the trainer holds, then the loop, with evaluations before, during and after it."""
        config = self._config
        await run.trainers.connect(run.fleet.urls, self._push_config(run))
        await run.trainers.push(self.version)
        logger.info("the engines serve version %d", self.version)
        prompts = await run.workers.prompts(config.env.split, config.env.num_prompts)
        self._check_unchanged(run, prompts, commit)
        stream = PromptStream(prompts, seed=config.run.seed)
        stream.restore({**stream.state(), "drawn": self._ledger.drawn()})
        resume = take_up(self._ledger, trajectories=self._run_dir.trajectories, prompts=prompts)
        buffer = GroupBuffer(config.rollout, observer=self._observe, version=self.version)
        buffer.restore(resume)
        is_start = not self.version and config.eval.at_start
        if (is_start or config.eval.is_due(self.version)) and (metrics := await self._evaluate()):
            self._monitor.log_late(self.version, metrics)
        if self._usage is None:
            self._usage = RunUsage(await run.sessions.counters(), monitor=self._monitor)
        if commit is None:
            await self._commit(run, 0)  # a run that dies in its first steps goes on from here
        try:
            await loop.run(
                produce=partial(
                    produce,
                    prompts=stream,
                    buffer=buffer,
                    run_group=in_flight,
                    group_size=config.rollout.group_size,
                    gate=self._gate,
                    spool=self._finished,
                    resume=resume,
                ),
                buffer=buffer,
                trainer=run.trainers,
                sync=run.trainers,
                advantages=partial(advantages_by_episode, advantage=config.rollout.advantage),
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

    def _check_unchanged(self, run: Started, prompts: Sequence[Prompt], commit: Checkpoint | None) -> None:
        """Model and data are those that the last commit was made with."""
        self._fingerprint = {"model": fingerprint_model(run.policy), "prompts": fingerprint_prompts(prompts)}
        if commit is not None:
            before = self._checkpoints.load_state(commit)["fingerprint"]
            refuse(compare(before, self._fingerprint), accept_changes=self._accept_changes)

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
        more |= self._arrivals.metrics() | run.fleet.metrics()
        if self._config.eval.is_due(version):
            more |= await self._evaluate()
        # Nothing may be awaited behind this: a step that is committed has its row in the metrics.
        if self._commits.is_due(version, is_last=version == self._config.run.steps):
            more |= await self._commit(run, version)
        return more

    async def _commit(self, run: Started, step: int) -> dict[str, float]:
        state = {
            "version": step,
            "drawn": self._ledger.drawn(),
            "next_group": self._ledger.next_group(),
            "open_groups": [group.id for group in self._ledger.open_groups()],
            "fingerprint": self._fingerprint,
        }
        return await self._commits.begin(step, trainers=run.trainers, state=state)

    async def _evaluate(self) -> dict[str, float]:
        """Have the present weights evaluated, unless they have a score already."""
        if self._ledger.scores().get(self.version) is not None:
            return {}
        return await self._evaluator.begin(self.version)

    async def _make_evaluator(self, run: Started, in_flight: InFlight) -> Evaluator:
        return await build_evaluator(
            self._config.eval,
            run_dir=self._run_dir,
            log=self._eval_log,
            monitor=self._monitor,
            gate=self._gate,
            in_flight=in_flight,
            prompts=run.workers.prompts,
            run_group_into=run.workers.evaluate_into,
            export=run.trainers.export_serving,
            serving=partial(self._parts.evaluation, run.model),
        )

    def _push_config(self, run: Started) -> PushConfig:
        """`[sync]`, with a place in the run directory for the versions that go over the disk."""
        sync = self._config.sync
        if self._config.quant is not None and self._config.quant.quantize_activations:
            sync = replace(sync, dtype="keep")  # codes and scales are not to be cast
        if sync.way != "disk" or sync.disk_dir is not None:
            return sync
        return replace(sync, disk_dir=str(self._run_dir.path / "weights"), disk_template=str(run.model))
