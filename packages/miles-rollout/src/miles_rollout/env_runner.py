"""An environment against its deadline.

deadline: ctx.cancelled is set ─▶ grace: it may end by itself ─▶ it is cancelled ─▶ left behind if it swallows that
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from miles_tito import Ctx, Env, EpisodeResult, Outcome, Policy, Prompt

logger = logging.getLogger(__name__)

UNWIND_S = 2.0
"""Seconds that a cancelled environment and a session that is being closed get before they are left behind."""


class EnvRunner:
    """Runs a user's environment for the worker, which calls it once an attempt, hundreds at a time."""

    def __init__(self, env: Env, *, timeout_s: float, grace_s: float) -> None:
        """
        Args:
            timeout_s: of one attempt; it is in the message about an environment that ignores its deadline.
            grace_s: time after the deadline for the environment to end by itself.
        """
        self._env = env
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._abandoned: set[asyncio.Task[EpisodeResult]] = set()
        """Environments that swallowed their cancellation; the references keep them from vanishing unseen."""

    @property
    def num_abandoned(self) -> int:
        return len(self._abandoned)

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx, *, deadline: float) -> EpisodeResult:
        """The environment's result, or an infrastructure failure once deadline and grace have passed.

        Args:
            deadline: on the event loop's clock.

        Raises:
            Exception: whatever the environment raised.
        """
        loop = asyncio.get_running_loop()
        work = self._env.run(prompt, policy, replace(ctx, deadline=deadline))
        task = loop.create_task(work, name=f"env {ctx.episode_id}")
        try:
            await asyncio.wait([task], timeout=max(0.0, deadline - loop.time()))
            if not task.done():
                ctx.cancelled.set()
                await asyncio.wait([task], timeout=self._grace_s)
            if not task.done():
                await self._cancel(task)
                return infra_abort(
                    f"the environment ignored its deadline: still running {self._grace_s:g} s after the "
                    f"{self._timeout_s:g} s of `episode_timeout_s`; it was cancelled"
                )
        except asyncio.CancelledError:
            ctx.cancelled.set()
            await self._cancel(task)
            raise
        if task.cancelled():
            return infra_abort("the environment cancelled itself")
        result = task.result()
        if not isinstance(result, EpisodeResult):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's class)
            raise TypeError(f"env.run returned {type(result).__name__}; it must return an EpisodeResult")
        return result

    async def _cancel(self, task: asyncio.Task[EpisodeResult]) -> None:
        """Cancel an environment; one that swallows the cancellation is left behind rather than waited for."""
        task.cancel()
        await asyncio.wait([task], timeout=UNWIND_S)
        if not task.done():
            logger.warning("%s swallowed its cancellation and is left behind", task.get_name())
            self._abandoned.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[EpisodeResult]) -> None:
        """What a cancelled environment ended with no longer matters; asyncio warns unless somebody looks."""
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()


def infra_abort(error: str) -> EpisodeResult:
    """The result of an episode that failed for want of infrastructure."""
    return EpisodeResult(outcome=Outcome.INFRA_ABORT, error=error)
