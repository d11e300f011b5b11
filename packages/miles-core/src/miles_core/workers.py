"""The worker process of a run: one environment, many episodes, every finished group spooled and stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_rollout.config import RolloutConfig
from miles_rollout.worker import Worker
from miles_tito.client import SessionClient
from miles_tito.errors import MilesError
from miles_tito.records import Env, Group, Prompt, Sampling
from miles_tito.summary import GroupRef, summarize

from .config import EnvConfig
from .importing import load
from .spool import SpoolWriter


class EnvError(MilesError, TypeError):
    """`env.target` does not build an environment."""


def build_env(config: EnvConfig) -> Env:
    """Call the factory that `env.target` names with `env.args`; an Env object is taken as it is.

    Raises:
        EnvError: what is found is no environment and makes none.
    """
    assert config.target is not None, "checked with the configuration"
    target, args = config.target, dict(config.args)
    found = load(target, what="env.target")
    if isinstance(found, Env) and not isinstance(found, type):
        if args:
            raise EnvError(f"`env.target` is {target!r}, an environment and not a factory, but `env.args` is {args}.")
        return found
    if not callable(found):
        raise EnvError(f"`env.target` is {target!r}, a {type(found).__name__}; it must be a factory of an Env.")
    try:
        env = found(**args)
    except TypeError as error:
        raise EnvError(
            f"`env.target` = {target!r} could not be called with `env.args` = {dict(args)}: {error}"
        ) from error
    if not isinstance(env, Env):
        raise EnvError(
            f"`env.target` = {target!r} returned a {type(env).__name__} that is no Env: it needs `tasks(split)`, "
            "`async run(prompt, policy, ctx)` and `async aclose()`."
        )
    return env


class RolloutWorker:
    """Runs groups, spools the ones that training will see, and hands out references."""

    def __init__(
        self,
        *,
        name: str,
        env: Env,
        config: RolloutConfig,
        num_workers: int,
        run_id: str,
        trajectories: Path,
        store: Callable[[Group], Any],
    ) -> None:
        """
        Args:
            store: keeps a group where trainer ranks can fetch it; what it returns becomes the reference's handle.
        """
        self._env = env
        self._config = config
        self._num_workers = num_workers
        self._run_id = run_id
        self._spool = SpoolWriter(trajectories, name)
        self._store = store
        self._sessions: SessionClient | None = None
        self._worker: Worker | None = None

    def connect(self, sessions: Sequence[str]) -> None:
        """Name the session servers that episodes talk to."""
        self._sessions = SessionClient(sessions)
        self._worker = Worker.from_config(
            self._config, env=self._env, sessions=self._sessions, run_id=self._run_id, num_workers=self._num_workers
        )

    def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        """The environment's prompts of `split`, at most `limit` of them."""
        prompts = list(itertools.islice(self._env.tasks(split), limit))
        if not prompts:
            raise EnvError(f"The environment has no prompts in split {split!r}.")
        return prompts

    async def run_group(
        self,
        prompt: Prompt,
        *,
        group_id: str,
        group_size: int,
        attempt: int = 0,
        sampling: Sampling | None = None,
        spool: bool = True,
    ) -> GroupRef:
        """One group; durable in the spool before its reference leaves this process, unless it is an evaluation's."""
        assert self._worker is not None, "connect() comes first"
        group = await self._worker.run_group(
            prompt, group_id=group_id, group_size=group_size, attempt=attempt, sampling=sampling
        )
        if not spool:
            return replace(summarize(group), handle=None)
        address = self._spool.append(group)
        ref = summarize(group, handle=self._store(group))
        return replace(ref, metadata={**ref.metadata, "spool": (address.file, address.offset)})

    async def stop(self) -> None:
        await self._env.aclose()
        if self._sessions is not None:
            await self._sessions.aclose()
        self._spool.close()
