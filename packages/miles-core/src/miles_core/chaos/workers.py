"""Rollout workers in this process: the real ones, with scripted sessions and a scripted task."""

from __future__ import annotations

from typing import Any

from miles_rollout.dispatch import LeastBusy
from miles_rollout.worker import Worker
from miles_tito.errors import MilesError
from miles_tito.records import Prompt, Sampling
from miles_tito.summary import GroupRef

from miles_core.config import Config
from miles_core.rundir import RunDir
from miles_core.workers import RolloutWorker

from .environment import ScriptedEnv
from .sessions import ScriptedSessions
from .world import World


class WorkerDied(MilesError, RuntimeError):
    """The process of a worker is gone, as Ray tells it to whoever waits for a group."""


class ScriptedWorkers:
    """Implements `miles_core.parts.Workers`."""

    def __init__(self, world: World, config: Config, *, run_dir: RunDir, env: ScriptedEnv) -> None:
        self._world = world
        self._config = config
        self._run_dir = run_dir
        self._env = env
        self._workers: list[_InProcess] = []
        self.run_group = self.run_unspooled = LeastBusy([self._nobody])

    async def open(self) -> None:
        count = self._config.workers.count
        self._workers = [
            _InProcess(
                name=f"worker-{index}",
                env=self._env,
                config=self._config.rollout,
                num_workers=count,
                run_id="chaos",
                trajectories=self._run_dir.trajectories,
                store=lambda group: group,
            )
            for index in range(count)
        ]

    async def connect(self, sessions: ScriptedSessions) -> None:
        self._env.sessions = sessions
        for worker in self._workers:
            worker.use(sessions)
        self.run_group = LeastBusy([_Remote(worker, self._world, spool=True) for worker in self._workers])
        self.run_unspooled = LeastBusy([_Remote(worker, self._world, spool=False) for worker in self._workers])

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return self._workers[0].prompts(split, limit)

    async def stop(self) -> None:
        for worker in self._workers:
            await worker.stop()

    async def _nobody(self, *_: Any, **__: Any) -> GroupRef:
        raise AssertionError("the workers are connected before they run anything")


class _InProcess(RolloutWorker):
    """A worker whose sessions are no servers."""

    def use(self, sessions: ScriptedSessions) -> None:
        self._worker = Worker.from_config(
            self._config, env=self._env, sessions=sessions, run_id=self._run_id, num_workers=self._num_workers
        )


class _Remote:
    """A worker as the producer sees it; its process may be gone."""

    def __init__(self, worker: RolloutWorker, world: World, *, spool: bool) -> None:
        self._worker = worker
        self._world = world
        self._spool = spool

    async def __call__(
        self, prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef:
        if self._spool:
            self._world.record.add(
                "run", start=self._world.start, group=group_id, prompt=prompt.id, attempt=attempt
            )
        if self._world.fault("worker_dies") is not None:
            raise WorkerDied("The process of worker 0 died.")
        run = self._worker.run_group if self._spool else self._worker.evaluate_group
        return await run(prompt, group_id=group_id, group_size=group_size, attempt=attempt, sampling=sampling)
