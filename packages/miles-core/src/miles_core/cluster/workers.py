"""The rollout workers, a process each: who runs a group, and what becomes of it when that process dies.

run_group ─▶ least busy worker ─▶ its process ─▶ GroupRef
                   ▲                  ✕ died: a new process, the group's next attempt
                   └──────────────────┘   MAX_LOSSES times: a failed group
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_rollout.dispatch import GroupRequest, RunGroup
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef

from miles_core.actors.rollout_worker import MAX_LOSSES, RolloutWorker, lost_group
from miles_core.config import Config
from miles_core.durable.rundir import RunDir

from .remote import OnEvent, ProcessDied, Remote, Resources, put, stop_all
from .sessions import SessionServers


class RolloutWorkers:
    """The rollout workers of a run; a group goes to the least busy one, and to a new process when its worker's dies.

    The producer calls `run_group` for training, an evaluation what `evaluate_into` returns.
    """

    def __init__(self, config: Config, *, run_dir: RunDir, on_event: OnEvent, evaluates_only: bool = False) -> None:
        """
        Args:
            on_event: called when a worker died and is started again.
            evaluates_only: nothing that they run is for training, so they have no spool.
        """
        self._attempts = config.rollout.retries + 1
        """Attempts of an episode that one worker may make."""
        self._training = 0
        """Groups for training that run."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._workers = [
            _Worker(config, index, run_dir=run_dir, on_event=on_event, evaluates_only=evaluates_only)
            for index in range(config.workers.count)
        ]

    async def open(self) -> None:
        """Build the environment in every worker.

        Raises:
            ImportStringError: `env.target` leads nowhere.
            EnvError: it makes no environment.
        """
        await asyncio.gather(*(worker.process.call("open") for worker in self._workers))

    async def connect(self, sessions: SessionServers) -> None:
        await asyncio.gather(*(worker.connect(sessions) for worker in self._workers))

    async def pause(self, is_paused: bool) -> None:
        """Hold back the episodes of every worker, because no engine serves, or let them go on."""
        await asyncio.gather(*(worker.pause(is_paused) for worker in self._workers))

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        """The environment's prompts of `split`, at most `limit` of them."""
        worker = self._workers[0]
        while True:
            spawned = worker.process.spawned
            try:
                return await worker.process.call("prompts", split, limit)
            except ProcessDied:
                await worker.replace(spawned)

    async def run_group(self, request: GroupRequest) -> GroupRef:
        """A group for training; durable in the spool when the reference comes back."""
        self._training += 1
        self._is_idle.clear()
        try:
            return await self._run(request, "run_group")
        finally:
            self._training -= 1
            if not self._training:
                self._is_idle.set()

    async def idle(self) -> None:
        """Wait until no group for training runs; close the gate of the producer first."""
        await asyncio.sleep(0)  # a group that passed the gate just before is a task that has not begun yet
        await self._is_idle.wait()

    def evaluate_into(self, folder: Path | None) -> RunGroup:
        """Runs groups of an evaluation: summaries only; their conversations are written to `folder`."""
        return partial(self._run, method="evaluate_group", folder=folder)

    async def stop(self) -> None:
        await stop_all([worker.process for worker in self._workers])

    async def _run(self, request: GroupRequest, method: str, **more: Any) -> GroupRef:
        worker = min(self._workers, key=lambda worker: worker.episodes)
        worker.episodes += request.group_size
        try:
            for losses in range(MAX_LOSSES):
                async with worker.alone if losses == MAX_LOSSES - 1 else nullcontext():
                    spawned = worker.process.spawned
                    try:
                        return await worker.process.call(method, request, **more)
                    except ProcessDied:
                        await worker.replace(spawned)
                        # Above all attempts that the dead worker may have made.
                        request = replace(request, attempt=request.attempt + self._attempts)
            return lost_group(request)
        finally:
            worker.episodes -= request.group_size


class _Worker:
    """One worker, whatever becomes of its process."""

    def __init__(self, config: Config, index: int, *, run_dir: RunDir, on_event: OnEvent, evaluates_only: bool) -> None:
        name = f"eval-worker-{index}" if evaluates_only else f"worker-{index}"
        # One call a group, evaluations beside them.
        resources = Resources(concurrency=config.rollout.num_credits + 1024)
        self.process = Remote(RolloutWorker, kind="worker", name=name, resources=resources, on_event=on_event)
        self.episodes = 0
        """Of the groups that it runs."""
        self.alone = asyncio.Lock()
        """Held by the one group at a time that may be what kills workers."""
        self._replacing = asyncio.Lock()
        self._sessions: SessionServers | None = None
        self._is_paused = False
        self._spawn = partial(
            self.process.spawn,
            name=name,
            env=config.env,
            config=config.rollout,
            num_workers=config.workers.count,
            run_id=run_dir.path.name,
            trajectories=None if evaluates_only else run_dir.trajectories,
            store=put,
        )
        self._spawn()

    async def connect(self, sessions: SessionServers) -> None:
        self._sessions = sessions
        await self.process.call("connect", sessions.urls, api_key=sessions.api_key)

    async def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        with suppress(ProcessDied):  # its successor learns of it when it is up
            await self.process.call("pause", is_paused)

    async def replace(self, dead: int) -> None:
        """A new process in place of number `dead`, once, however many of its groups ask for it.

        Raises:
            ProcessLostError: it dies again and again.
        """
        async with self._replacing:
            while self.process.spawned == dead:
                await self.process.backoff("its process died")
                self._spawn()
                try:
                    await self.process.call("open")
                    if self._sessions is not None:
                        await self.connect(self._sessions)
                    await self.process.call("pause", self._is_paused)
                except ProcessDied:
                    dead = self.process.spawned
