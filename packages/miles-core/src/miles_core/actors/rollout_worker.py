"""The worker process of a run: one environment, many episodes, every finished group spooled and stored."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_rollout.config import RolloutConfig
from miles_rollout.dispatch import FAILED_BECAUSE, GroupRequest
from miles_rollout.worker import Worker
from miles_tito.client import SessionClient
from miles_tito.errors import MilesError
from miles_tito.records import Env, Episode, Group, Outcome, Prompt
from miles_tito.records.summary import GroupRef, summarize
from miles_tito.shared.plugins import call, load

from miles_core.config import EnvConfig
from miles_core.durable.spool import SpoolWriter, spooled

logger = logging.getLogger(__name__)

MAX_LOSSES = 3
"""Workers that one group may lose before it has failed: it may be what kills them. In the last one it runs with no
other such group beside it, so that the many that ran with the one that kills do not fail for it."""
MOST_PROMPTS = 1_000_000
"""Prompts that a split without `num_prompts` may have; an endless generator would be read for ever."""

WORKER_LOST = "worker_lost"
"""Reason of a group whose workers died under it."""


class EnvError(MilesError, TypeError):
    """`env.target` does not build an environment."""


def build_env(config: EnvConfig) -> Env:
    """Call the factory that `env.target` names with `env.args`; an Env object is taken as it is.

    Raises:
        ImportStringError: there is no such factory, or it does not take `env.args`.
        EnvError: what it returns is no environment.
    """
    assert config.target is not None, "checked with the configuration"
    target, args = config.target, dict(config.args)
    found = load(target, what="env.target")
    if isinstance(found, Env) and not isinstance(found, type):
        if args:
            raise EnvError(f"`env.target` is {target!r}, an environment and not a factory, but `env.args` is {args}.")
        return found
    env = call(target, keywords=args, what="env.target")
    if not isinstance(env, Env):
        raise EnvError(
            f"`env.target` = {target!r} returned a {type(env).__name__} that is no Env: it needs `tasks(split)`, "
            "`async run(prompt, policy, ctx)` and `async aclose()`."
        )
    return env


class RolloutWorker:
    """Runs the episodes of groups in the user's environment, and keeps each finished group on disk.

    `RolloutWorkers` keeps one in each worker process: `open`, then `connect`, then any number of groups at once.
    """

    def __init__(
        self,
        *,
        name: str,
        env: EnvConfig,
        config: RolloutConfig,
        num_workers: int,
        run_id: str,
        trajectories: Path | None,
        store: Callable[[Group], Any],
    ) -> None:
        """
        Args:
            trajectories: where groups for training are spooled; None for a worker that only evaluates.
            store: keeps a group where trainer ranks can fetch it, as long as this process lives; returns a reference.
        """
        self._env_config = env
        self._env: Env | None = None
        self._config = config
        self._num_workers = num_workers
        self._run_id = run_id
        self._trajectories = trajectories
        self._spool: SpoolWriter | None = None
        self._name = name
        self._kept: tuple[Path, SpoolWriter] | None = None
        """The folder of the evaluation that is being kept."""
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="spool")
        """Writes one group at a time: hundreds of episodes must not wait for a device to flush."""
        self._store = store
        self._sessions: SessionClient | None = None
        self._worker: Worker | None = None

    async def open(self) -> None:
        """Build the environment. Not in `__init__`: what that raises reaches nobody from another process.

        Raises:
            ImportStringError: `env.target` leads nowhere.
            EnvError: it makes no environment.
        """
        self._env = build_env(self._env_config)
        if self._trajectories is not None:
            self._spool = SpoolWriter(self._trajectories, self._name)

    async def connect(self, sessions: Sequence[str], *, api_key: str) -> None:
        """Name the session servers that episodes talk to, and the key that opens sessions there."""
        assert self._env is not None, "open() comes first"
        self._sessions = SessionClient(sessions, api_key=api_key)
        self._worker = Worker.from_config(
            self._config, env=self._env, sessions=self._sessions, run_id=self._run_id, num_workers=self._num_workers
        )

    async def pause(self, is_paused: bool) -> None:
        """Hold episodes back, because no engine serves, or let them go on."""
        if self._worker is not None:
            self._worker.hold(is_paused)

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]:
        """The environment's prompts of `split`, at most `limit` of them."""
        assert self._env is not None, "open() comes first"
        most = MOST_PROMPTS + 1 if limit is None else limit
        prompts = list(itertools.islice(self._env.tasks(split), most))
        if not prompts:
            raise EnvError(f"The environment has no prompts in split {split!r}.")
        if len(prompts) > MOST_PROMPTS and limit is None:
            raise EnvError(
                f"Split {split!r} of the environment has more than {MOST_PROMPTS:,} prompts, maybe without end. "
                "Say how many to use with `num_prompts`."
            )
        return prompts

    async def run_group(self, request: GroupRequest) -> GroupRef:
        """One group for training; durable in the spool before its reference leaves this process."""
        assert self._worker is not None, "connect() comes first"
        assert self._spool is not None, "a worker that only evaluates"
        assert self._trajectories is not None
        group = await self._worker.run_group(request)
        address = await asyncio.get_running_loop().run_in_executor(self._disk, self._spool.append, group)
        return spooled(group, address, self._trajectories, stored=self._store(group))

    async def evaluate_group(self, request: GroupRequest, *, folder: Path | None = None) -> GroupRef:
        """One group for an evaluation: the summary alone goes back.

        Args:
            folder: where its conversations are written, to be read by people; the score does not depend on it.
        """
        assert self._worker is not None, "connect() comes first"
        group = await self._worker.run_group(request)
        if folder is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._disk, self._keep, folder, group)
            except OSError as error:
                logger.warning("the conversations of %s are not kept: %s", request.group_id, error)
        return replace(summarize(group), handle=None)

    def _keep(self, folder: Path, group: Group) -> None:
        if self._kept is None or self._kept[0] != folder or not folder.exists():
            self._close_kept()
            self._kept = (folder, SpoolWriter(folder, self._name))
        self._kept[1].append(group)

    def _close_kept(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    async def stop(self) -> None:
        """Close the environment, the connections and the spool; one that fails does not keep the others open."""
        try:
            if self._env is not None:
                await self._env.aclose()
        finally:
            if self._sessions is not None:
                await self._sessions.aclose()
            await asyncio.to_thread(self._disk.shutdown)  # what is being written is written whole
            self._close_kept()
            if self._spool is not None:
                self._spool.close()


def lost_group(request: GroupRequest) -> GroupRef:
    """What is left of a group whose workers died under it: failed episodes."""
    episodes = tuple(
        Episode(
            id=f"{request.group_id}/{index}",
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            outcome=Outcome.INFRA_ABORT,
            attempt=request.attempt,
            error=f"{WORKER_LOST}: the process of its worker died, more than once; its log is in Ray's session folder",
        )
        for index in range(request.group_size)
    )
    group = Group(id=request.group_id, prompt_id=request.prompt.id, episodes=episodes)
    return replace(summarize(group), handle=None, metadata={FAILED_BECAUSE: WORKER_LOST})
