"""The rollout workers, an actor each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from miles_rollout.dispatch import LeastBusy, RunGroup
from miles_tito.records import Prompt, Sampling
from miles_tito.summary import GroupRef

from miles_core.config import Config
from miles_core.rundir import RunDir

from . import actors
from .processes import spawn, stop_all
from .sessions import SessionServers


class Workers:
    """The rollout workers; a group goes to the least busy one."""

    def __init__(self, config: Config, *, run_dir: RunDir) -> None:
        concurrency = config.rollout.num_credits + 1024  # one call a group, evaluations beside them
        self._config = config
        self._run_dir = run_dir
        self._actors = [spawn(actors.WorkerActor, concurrency=concurrency)() for _ in range(config.workers.count)]
        self.run_group = LeastBusy([_RemoteWorker(actor.run_group.remote) for actor in self._actors])
        """Groups for training."""
        self.run_unspooled = self.evaluate_into(None)

    def evaluate_into(self, folder: Path | None) -> RunGroup:
        """Groups for evaluation: summaries only; their conversations are written to `folder`."""
        return LeastBusy([_RemoteWorker(actor.evaluate_group.remote, folder) for actor in self._actors])

    async def open(self) -> None:
        """Build the environment in every worker.

        Raises:
            ImportStringError: `env.target` leads nowhere.
            EnvError: it makes no environment.
        """
        await asyncio.gather(
            *(
                actor.open.remote(
                    name=f"worker-{index}",
                    env=self._config.env,
                    config=self._config.rollout,
                    num_workers=len(self._actors),
                    run_id=self._run_dir.path.name,
                    trajectories=self._run_dir.trajectories,
                )
                for index, actor in enumerate(self._actors)
            )
        )

    async def connect(self, sessions: SessionServers) -> None:
        await asyncio.gather(*(actor.connect.remote(sessions.urls, sessions.api_key) for actor in self._actors))

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        return await self._actors[0].prompts.remote(split, limit)

    async def stop(self) -> None:
        await stop_all(self._actors, what="worker")


class _RemoteWorker:
    """A method of one worker actor as the `RunGroup` that the producer calls; cancellation reaches the actor."""

    def __init__(self, method: Callable[..., Any], *more: Any) -> None:
        self._method = method
        self._more = more

    async def __call__(
        self, prompt: Prompt, *, group_id: str, group_size: int, attempt: int = 0, sampling: Sampling | None = None
    ) -> GroupRef:
        ref = self._method(prompt, group_id, group_size, attempt, sampling, *self._more)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
