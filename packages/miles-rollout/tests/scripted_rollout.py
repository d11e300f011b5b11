"""Scripted stand-ins for the rollout tests: a clock that never waits, sessions, an environment, groups."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from miles_rollout import RolloutConfig, Verdict
from miles_tito import (
    Ctx,
    Episode,
    EpisodeResult,
    FinishReason,
    Group,
    GroupRef,
    Outcome,
    Policy,
    Prompt,
    Sampling,
    Trajectory,
    VersionSpan,
    summarize,
)

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Every task waits for another one and no timer is set."""


class _VirtualSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise DeadlockError("nothing is scheduled and nobody can wake up")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when every task waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time: deterministic, and a deadlock is an error at once."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


def trajectory(
    trajectory_id: str = "t", *, version: int = 0, length: int = 4, finish: FinishReason = FinishReason.STOP
) -> Trajectory:
    """One prompt token and `length - 1` sampled ones of one version."""
    mask = np.arange(length) > 0
    return Trajectory(
        id=trajectory_id,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=(VersionSpan(start=1, end=length, version=version),) if length > 1 else (),
        finish_reason=finish,
    )


def make_group(
    group_id: str,
    rewards: Sequence[float | None],
    *,
    versions: int | Sequence[int] = 0,
    prompt_id: str | None = None,
    error: str = "engine is gone",
    finish: FinishReason = FinishReason.STOP,
) -> Group:
    """A group with one single-trajectory episode for each reward; None is a failed episode."""
    prompt_id = prompt_id or f"p-{group_id}"
    per_episode = [versions] * len(rewards) if isinstance(versions, int) else list(versions)
    episodes = tuple(
        Episode(
            id=f"{group_id}/{i}",
            prompt_id=prompt_id,
            group_id=group_id,
            outcome=Outcome.INFRA_ABORT if reward is None else Outcome.GRADED,
            reward=reward,
            error=error if reward is None else None,
            trajectories=()
            if reward is None
            else (trajectory(f"{group_id}/{i}.0", version=per_episode[i], finish=finish),),
        )
        for i, reward in enumerate(rewards)
    )
    return Group(id=group_id, prompt_id=prompt_id, episodes=episodes)


def make_ref(group_id: str, rewards: Sequence[float | None] = (0.0, 1.0), **fields: Any) -> GroupRef:
    return summarize(make_group(group_id, rewards, **fields))


def make_fan_out_ref(
    group_id: str, versions: Mapping[float, Sequence[int]], *, failed: int = 0, finish: FinishReason = FinishReason.STOP
) -> GroupRef:
    """A group in which the episode with each reward made one trajectory for each version; `failed` more made none."""
    group = make_group(group_id, [*versions, *[None] * failed], finish=finish)
    fanned = [
        replace(
            episode,
            trajectories=tuple(
                trajectory(f"{episode.id}.{i}", version=version, length=3 + i, finish=finish)
                for i, version in enumerate(versions[episode.reward])
            ),
        )
        if episode.reward is not None
        else episode
        for episode in group.episodes
    ]
    return summarize(replace(group, episodes=tuple(fanned)))


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}") for i in range(count)]


def make_config(**fields: Any) -> RolloutConfig:
    """A small configuration: groups of 2, batches of 2."""
    settings: dict[str, Any] = {"group_size": 2, "groups_per_step": 2} | fields
    return RolloutConfig(**settings)


class ScriptedSessions:
    """Sessions in memory: each records one trajectory of the version that was current when it opened."""

    def __init__(self, *, version: Callable[[], int] = lambda: 0) -> None:
        self.opened: dict[str, Mapping[str, object]] = {}
        self.samplings: dict[str, Sampling] = {}
        self.live: dict[str, int] = {}
        self.closed: list[str] = []
        self.most_live = 0
        self.recorded: Callable[[str, int], tuple[Trajectory, ...]] = lambda session_id, version: (
            trajectory(session_id, version=version),
        )
        self.refuse_open: Callable[[str], Exception | None] = lambda session_id: None
        self.refuse_close: Callable[[str], Exception | None] = lambda session_id: None
        self._version = version

    async def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        metadata: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> Policy:
        assert session_id not in self.opened, f"session {session_id} is opened twice"
        self.opened[session_id] = {**(metadata or {}), "deadline_s": deadline_s}
        self.samplings[session_id] = sampling
        if (error := self.refuse_open(session_id)) is not None:
            raise error
        self.live[session_id] = self._version()
        self.most_live = max(self.most_live, len(self.live))
        return Policy(
            base_url=f"http://sessions/{session_id}/v1",
            api_key="key",
            model="scripted",
            sampling=sampling,
            session_id=session_id,
        )

    async def trajectories(self, session_id: str) -> tuple[Trajectory, ...]:
        return self.recorded(session_id, self.live[session_id])

    async def close(self, session_id: str) -> None:
        self.live.pop(session_id, None)
        self.closed.append(session_id)
        if (error := self.refuse_close(session_id)) is not None:
            raise error


class ScriptedEnv:
    """An environment whose episodes do what `play` says."""

    def __init__(self, play: Callable[[Prompt, Policy, Ctx], Awaitable[EpisodeResult]]) -> None:
        self.play = play
        self.running = 0
        self.most_running = 0

    def tasks(self, split: str) -> Iterable[Prompt]:
        return make_prompts(4)

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.play(prompt, policy, ctx)
        finally:
            self.running -= 1

    async def aclose(self) -> None:
        return None


def graded(reward: float = 1.0) -> EpisodeResult:
    return EpisodeResult(outcome=Outcome.GRADED, reward=reward)


def always_keep(ref: GroupRef, *, required_rewards: int) -> Verdict:
    """A user's failure policy."""
    return Verdict.KEEP


def always_retry(ref: GroupRef, *, required_rewards: int) -> Verdict:
    return Verdict.RETRY


def always_mask(ref: GroupRef, *, required_rewards: int) -> Verdict:
    return Verdict.MASK


def broken_filter(ref: GroupRef) -> str | None:
    """A user's filter with a bug."""
    raise KeyError("no such label")
