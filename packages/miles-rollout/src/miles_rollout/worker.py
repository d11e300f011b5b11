"""Runs the sibling episodes of a prompt against recording sessions, hundreds at once on one event loop.

    permit ─▶ open session ─▶ env.run ─▶ permit back ─▶ read trajectories ─▶ close session ─▶ Episode

An episode that fails is data: an `Episode` with an error and no reward. Only cancellation of `run_group` itself
raises.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol

from miles_tito import (
    Ctx,
    Env,
    Episode,
    EpisodeResult,
    FailedAttempt,
    FinishReason,
    Group,
    GroupRef,
    Outcome,
    Policy,
    Sampling,
    Trajectory,
    summarize,
)
from miles_tito.records.episodes import mask_older_versions
from miles_tito.shared.backoff import delay_s
from miles_tito.shared.settings import SettingError

from .config import RolloutConfig
from .dispatch import GroupRequest
from .env_runner import UNWIND_S, EnvRunner, infra_abort

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 60.0
"""The wait between two attempts of an episode grows up to this."""


class Sessions(Protocol):
    """Recording sessions, which a worker opens one an attempt; `miles_tito.client.SessionClient` offers them."""

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> Policy: ...

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]: ...

    async def close(self, session_id: str) -> None: ...


class Worker:
    """Runs groups for the producer and for evaluations; one object serves any number of them at once."""

    def __init__(
        self,
        *,
        env: Env,
        sessions: Sessions,
        sampling: Sampling,
        run_id: str,
        episode_timeout_s: float,
        permits: asyncio.Semaphore | int,
        grace_s: float = 5.0,
        retries: int = 1,
        backoff_s: float = 0.0,
        partial: Literal["train", "mask"] = "train",
    ) -> None:
        """
        Args:
            permits: episodes that run at once; share one semaphore between workers of a process, or give a number.
            grace_s: time after the deadline for the environment to end by itself.
            retries: further attempts of an episode that ended with an infrastructure failure.
            backoff_s: wait before the first of them; doubles with each. No permit is held meanwhile.
            partial: whether tokens older than the newest weights of their trajectory are trained.
        """
        self._env = EnvRunner(env, timeout_s=episode_timeout_s, grace_s=grace_s)
        self._sessions = sessions
        self._sampling = sampling
        self._run_id = run_id
        self._episode_timeout_s = episode_timeout_s
        self._permits = asyncio.Semaphore(permits) if isinstance(permits, int) else permits
        self._retries = retries
        self._backoff_s = backoff_s
        self._partial = partial
        self._num_running = 0
        self._num_retried = 0
        self._serving = asyncio.Event()
        """Set while an engine serves."""
        self._serving.set()
        self._held_until = -math.inf
        """End of the last time without an engine."""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, *, env: Env, sessions: Sessions, run_id: str, num_workers: int = 1
    ) -> Worker:
        """One of `num_workers` workers, with its share of the permits."""
        if num_workers > config.max_concurrent_episodes:
            raise SettingError(
                f"{num_workers} workers cannot share {config.max_concurrent_episodes} permits "
                "(`max_concurrent_episodes`): each needs at least one."
            )
        return cls(
            env=env,
            sessions=sessions,
            sampling=config.sampling,
            run_id=run_id,
            episode_timeout_s=config.episode_timeout_s,
            permits=config.max_concurrent_episodes // num_workers,
            grace_s=config.deadline_grace_s,
            retries=config.retries,
            backoff_s=config.retry_backoff_s,
            partial=config.partial,
        )

    def hold(self, is_held: bool) -> None:
        """Hold episodes back, because no engine serves any more, or let them start again.

        An episode that spent its time waiting for engines has failed, whatever the environment makes of it: it is no
        limit of the policy.
        """
        if is_held:
            self._serving.clear()
        elif not self._serving.is_set():
            self._held_until = asyncio.get_running_loop().time()
            self._serving.set()

    async def run_group(self, request: GroupRequest) -> Group:
        """Run the episodes of a group at once; never raises for a failed one."""
        async with asyncio.TaskGroup() as running:
            tasks = [
                running.create_task(self._run_episode(request, index), name=f"episode {request.group_id}/{index}")
                for index in range(request.group_size)
            ]
        episodes = tuple(task.result() for task in tasks)
        return Group(id=request.group_id, prompt_id=request.prompt.id, episodes=episodes)

    async def run_group_ref(self, request: GroupRequest) -> GroupRef:
        """`run_group` as a producer in the same process wants it: the summary, with the group as its handle."""
        return summarize(await self.run_group(request))

    def metrics(self) -> dict[str, float]:
        """Episodes that run now; attempts repeated and environments left behind since the start."""
        return {
            "worker/running": float(self._num_running),
            "worker/retried": float(self._num_retried),
            "worker/abandoned": float(self._env.num_abandoned),
        }

    async def _run_episode(self, request: GroupRequest, index: int) -> Episode:
        """One episode with its retries; each attempt is a session of its own."""
        failed: list[FailedAttempt] = []
        while True:
            number = len(failed)
            ctx = Ctx(run_id=self._run_id, episode_id=f"{request.group_id}/{index}", attempt=request.attempt + number)
            episode = await self._run_attempt(request, ctx)
            if episode.outcome is not Outcome.INFRA_ABORT or number == self._retries:
                return replace(episode, failed_attempts=tuple(failed))
            self._num_retried += 1
            failed.append(_failed(episode))
            logger.warning("episode %s attempt %d failed and is retried: %s", episode.id, ctx.attempt, episode.error)
            # Spread, so that siblings do not come back as one crowd; by id, so that a replay waits the same.
            spread = random.Random(f"{ctx.episode_id}.{ctx.attempt}").uniform(0.75, 1.25)
            await asyncio.sleep(delay_s(number, first_s=self._backoff_s, longest_s=LONGEST_BACKOFF_S) * spread)

    async def _run_attempt(self, request: GroupRequest, ctx: Ctx) -> Episode:
        """One session from open to close, and what came of it."""
        session_id = f"{ctx.episode_id.replace('/', '-')}.{ctx.attempt}"
        clock = asyncio.get_running_loop().time
        started = clock()
        trajectories: tuple[Trajectory, ...] = ()
        try:
            async with self._permits:
                await self._serving.wait()
                started = clock()
                deadline = started + self._episode_timeout_s
                self._num_running += 1
                try:
                    policy = await self._open(session_id, request, ctx)
                    result = await self._env.run(request.prompt, policy, ctx, deadline=deadline)
                finally:
                    self._num_running -= 1
            was_held = not self._serving.is_set() or self._held_until > started
            if result.outcome is Outcome.POLICY_LIMIT and clock() >= deadline and was_held:
                result = infra_abort(
                    f"it reached its deadline of {self._episode_timeout_s:g} s while no engine served for a part of it"
                )
            if result.outcome.has_reward:
                result, trajectories = await self._read(session_id, result)
        except Exception as error:  # the one boundary where a failed episode becomes data
            result = infra_abort(f"{type(error).__name__}: {error}")
        finally:
            ctx.cancelled.set()
            await self._close(session_id)
        return Episode(
            id=ctx.episode_id,
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            outcome=result.outcome,
            attempt=ctx.attempt,
            reward=result.reward,
            error=result.error,
            trajectories=trajectories if result.outcome.has_reward else (),
            metrics=dict(result.metrics),
            seconds=clock() - started,
            finished_at=time.time(),
        )

    async def _open(self, session_id: str, request: GroupRequest, ctx: Ctx) -> Policy:
        metadata = {
            "run_id": ctx.run_id,
            "prompt_id": request.prompt.id,
            "group_id": request.group_id,
            "episode_id": ctx.episode_id,
            "attempt": ctx.attempt,
        }
        timeout_s = self._episode_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._sessions.open(
                    session_id, sampling=request.sampling or self._sampling, metadata=metadata, deadline_s=timeout_s
                )
        except TimeoutError as error:
            raise TimeoutError(f"the session was not opened within {timeout_s:g} s") from error

    async def _read(self, session_id: str, result: EpisodeResult) -> tuple[EpisodeResult, tuple[Trajectory, ...]]:
        """What the session recorded, without what the engine aborted.

        A reward without a single sampled token trains nothing, and says that something is broken.
        """
        recorded = await self._sessions.trajectories(session_id)
        whole = tuple(t for t in recorded if t.finish_reason is not FinishReason.ABORT)
        if self._partial == "mask":
            whole = tuple(map(mask_older_versions, whole))
        if any(t.num_loss_tokens for t in whole):
            return result, whole
        if len(recorded) > len(whole):
            return infra_abort(f"all of its {len(recorded)} trajectories were aborted by the engine"), whole
        error = (
            f"the environment gave the reward {result.reward} but its session recorded no sampled token; "
            "it has to send its model calls to `policy.base_url`"
        )
        return infra_abort(error), whole

    async def _close(self, session_id: str) -> None:
        """Close the session; a finished episode is not lost because this fails."""
        try:
            async with asyncio.timeout(UNWIND_S):
                await self._sessions.close(session_id)
        except Exception as error:  # the session server drops it at its own deadline
            logger.warning("session %s was not closed: %s: %s", session_id, type(error).__name__, error)


def _failed(episode: Episode) -> FailedAttempt:
    """What is kept of an attempt that is tried again."""
    assert episode.finished_at is not None, "_run_attempt looks at the clock"
    return FailedAttempt(
        attempt=episode.attempt,
        outcome=episode.outcome,
        error=episode.error,
        seconds=episode.seconds,
        finished_at=episode.finished_at,
    )
