"""Rollout workers in this process: the real ones, with scripted sessions and a scripted task. They can die."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from miles_rollout.dispatch import GroupRequest, LeastBusy, RunGroup
from miles_rollout.worker import Worker
from miles_tito.errors import MilesError
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef

from miles_core.actors.rollout_worker import MAX_LOSSES, RolloutWorker, lost_group
from miles_core.config import Config
from miles_core.durable.rundir import RunDir

from .environment import ScriptedEnv
from .sessions import ScriptedSessions
from .world import World

RESPAWN_S = 5.0


class WorkerDied(MilesError, RuntimeError):
    """The process of a worker is gone, as Ray tells it to whoever waits for a group."""


class ScriptedWorkers:
    """Implements `miles_core.parts.Workers`; a group that loses its worker runs again on another, as in a cluster."""

    def __init__(self, world: World, config: Config, *, run_dir: RunDir, env: ScriptedEnv) -> None:
        self._env = env
        self._slots = [_Slot(world, config, index, run_dir=run_dir, env=env) for index in range(config.workers.count)]
        self.run_group: RunGroup = LeastBusy([_Remote(slot, world, spool=True) for slot in self._slots])

    def evaluate_into(self, folder: Path | None) -> RunGroup:
        return LeastBusy([_Remote(slot, slot.world, spool=False) for slot in self._slots])

    async def open(self) -> None:
        for slot in self._slots:
            slot.open()

    async def connect(self, sessions: ScriptedSessions) -> None:
        self._env.sessions = sessions
        for slot in self._slots:
            slot.connect(sessions)

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return self._slots[0].process.worker.prompts(split, limit)

    async def stop(self) -> None:
        for slot in self._slots:
            await slot.process.worker.stop()


class _InProcess(RolloutWorker):
    """A worker whose sessions are no servers."""

    def use(self, sessions: ScriptedSessions) -> None:
        self._worker = Worker.from_config(
            self._config, env=self._env, sessions=sessions, run_id=self._run_id, num_workers=self._num_workers
        )


class _Process:
    """What dies with a worker: everything that it runs."""

    def __init__(self, worker: _InProcess) -> None:
        self.worker = worker
        self.died = asyncio.Event()


class _Slot:
    """The place of one worker, whatever becomes of its process."""

    def __init__(self, world: World, config: Config, index: int, *, run_dir: RunDir, env: ScriptedEnv) -> None:
        self.world = world
        self.retries = config.rollout.retries
        self._config = config
        self._index = index
        self._run_dir = run_dir
        self._env = env
        self._sessions: ScriptedSessions | None = None
        self._replacing = asyncio.Lock()
        self.process: _Process

    def open(self) -> None:
        worker = _InProcess(
            name=f"worker-{self._index}",
            env=self._env,
            config=self._config.rollout,
            num_workers=self._config.workers.count,
            run_id="chaos",
            trajectories=self._run_dir.trajectories,
            store=lambda group: group,
        )
        if self._sessions is not None:
            worker.use(self._sessions)
        self.process = _Process(worker)

    def connect(self, sessions: ScriptedSessions) -> None:
        self._sessions = sessions
        self.process.worker.use(sessions)

    async def replace(self, dead: _Process) -> None:
        async with self._replacing:
            if self.process is dead:
                await self.world.wait(RESPAWN_S)
                self.open()


class _Remote:
    """A worker as the producer sees it."""

    def __init__(self, slot: _Slot, world: World, *, spool: bool) -> None:
        self._slot = slot
        self._world = world
        self._spool = spool

    async def __call__(self, request: GroupRequest) -> GroupRef:
        for _ in range(MAX_LOSSES):
            process = self._slot.process
            if self._spool:
                self._world.record.add("run", start=self._world.start, group=request.group_id, attempt=request.attempt)
            if self._world.fault("worker_dies") is not None:
                process.died.set()
            try:
                return await self._ask(process, request)
            except WorkerDied:
                await self._slot.replace(process)
                request = replace(request, attempt=request.attempt + self._slot.retries + 1)
        return lost_group(request)

    async def _ask(self, process: _Process, request: GroupRequest) -> GroupRef:
        """The group, unless the worker dies under it: then nothing of it goes on."""
        worker = process.worker
        run = worker.run_group if self._spool else worker.evaluate_group
        running = asyncio.ensure_future(run(request))
        died = asyncio.ensure_future(process.died.wait())
        try:
            await asyncio.wait([running, died], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            raise WorkerDied("The process of a worker died.")
        finally:
            running.cancel()
            died.cancel()
