"""The rollout workers, an actor each."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from miles_rollout.dispatch import GroupRequest, LeastBusy, RunGroup
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef
from ray.exceptions import RayActorError

from miles_core.actors.rollout_worker import MAX_LOSSES, lost_group
from miles_core.config import Config
from miles_core.durable.rundir import RunDir
from miles_core.parts import Note

from . import actors
from .processes import spawn, stop_all
from .respawn import Respawns
from .sessions import SessionServers


class Workers:
    """The rollout workers; a group goes to the least busy one, and to a new one when its worker's process dies."""

    def __init__(self, config: Config, *, run_dir: RunDir, note: Note, evaluates_only: bool = False) -> None:
        """
        Args:
            evaluates_only: nothing that they run is for training, so they have no spool.
        """
        self._config = config
        self._run_dir = run_dir
        self._slots = [
            _Slot(config, index, run_dir=run_dir, note=note, evaluates_only=evaluates_only)
            for index in range(config.workers.count)
        ]
        self.run_group = LeastBusy([_RemoteWorker(slot, "run_group") for slot in self._slots])
        """Groups for training."""

    def evaluate_into(self, folder: Path | None) -> RunGroup:
        """Groups for evaluation: summaries only; their conversations are written to `folder`."""
        return LeastBusy([_RemoteWorker(slot, "evaluate_group", folder) for slot in self._slots])

    async def open(self) -> None:
        """Build the environment in every worker.

        Raises:
            ImportStringError: `env.target` leads nowhere.
            EnvError: it makes no environment.
        """
        await asyncio.gather(*(slot.open() for slot in self._slots))

    async def connect(self, sessions: SessionServers) -> None:
        await asyncio.gather(*(slot.connect(sessions.urls, sessions.api_key) for slot in self._slots))

    async def hold(self, is_held: bool) -> None:
        """Tell every worker when no engine serves any more, and when one does again."""
        await asyncio.gather(*(slot.hold(is_held) for slot in self._slots))

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        slot = self._slots[0]
        while True:
            actor = slot.actor
            try:
                return await actor.prompts.remote(split, limit)
            except RayActorError:
                await slot.replace(actor)

    async def stop(self) -> None:
        await stop_all([slot.actor for slot in self._slots], what="worker")


class _Slot:
    """The place of one worker, whatever becomes of its process."""

    def __init__(self, config: Config, index: int, *, run_dir: RunDir, note: Note, evaluates_only: bool) -> None:
        self._config = config
        self._name = f"eval-worker-{index}" if evaluates_only else f"worker-{index}"
        self._trajectories = None if evaluates_only else run_dir.trajectories
        self._run_dir = run_dir
        self._note = note
        self._respawns = Respawns("worker", self._name)
        self._respawning = asyncio.Lock()
        self.alone = asyncio.Lock()
        """Held by the one group at a time that may be what kills workers."""
        self._sessions: tuple[list[str], str] | None = None
        self._is_held = False
        self.actor = self._make()

    @property
    def retries(self) -> int:
        return self._config.rollout.retries

    async def open(self) -> None:
        await self.actor.open.remote(
            name=self._name,
            env=self._config.env,
            config=self._config.rollout,
            num_workers=self._config.workers.count,
            run_id=self._run_dir.path.name,
            trajectories=self._trajectories,
        )

    async def connect(self, urls: list[str], api_key: str) -> None:
        self._sessions = (urls, api_key)
        await self.actor.connect.remote(urls, api_key)

    async def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        with suppress(RayActorError):  # the next one is told when it is up
            await self.actor.hold.remote(is_held)

    async def replace(self, dead: Any) -> None:
        """A new process in place of `dead`, once, however many of its groups ask for it.

        Raises:
            PartLostError: it dies again and again.
        """
        async with self._respawning:
            while self.actor is dead:
                await self._respawns.after("its process died", self._note)
                ray.kill(dead)
                self.actor = self._make()
                try:
                    await self.open()
                    if self._sessions is not None:
                        await self.connect(*self._sessions)
                    await self.hold(self._is_held)
                except RayActorError:
                    dead = self.actor

    def _make(self) -> Any:
        concurrency = self._config.rollout.num_credits + 1024  # one call a group, evaluations beside them
        return spawn(actors.WorkerActor, concurrency=concurrency)()


class _RemoteWorker:
    """A method of one worker as the `RunGroup` that the producer calls; cancellation reaches the actor."""

    def __init__(self, slot: _Slot, method: str, *more: Any) -> None:
        self._slot = slot
        self._method = method
        self._more = more

    async def __call__(self, request: GroupRequest) -> GroupRef:
        for losses in range(MAX_LOSSES):
            async with self._slot.alone if losses == MAX_LOSSES - 1 else nullcontext():
                actor = self._slot.actor
                try:
                    return await self._ask(actor, request, *self._more)
                except RayActorError:
                    await self._slot.replace(actor)
                    attempt = request.attempt + self._slot.retries + 1  # above all that the dead worker may have made
                    request = replace(request, attempt=attempt)
        return lost_group(request)

    async def _ask(self, actor: Any, *args: Any) -> GroupRef:
        ref = getattr(actor, self._method).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
