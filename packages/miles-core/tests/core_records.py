"""Small groups of every shape for the tests of miles-core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from miles_tito.records import Episode, Group, Outcome, Trajectory, VersionSpan

VOCAB = 67


def make_trajectory(name: str, length: int, *, prompt: int = 2, version: int = 0, seed: int = 0) -> Trajectory:
    """Random tokens; all behind the first `prompt` are sampled by weights `version`."""
    rng = np.random.default_rng([seed, length])
    mask = np.arange(length) >= prompt
    return Trajectory(
        id=name,
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.uniform(-5, -3.5, length), 0).astype(np.float32),
        versions=(VersionSpan(start=prompt, end=length, version=version),) if length > prompt else (),
    )


def make_group(
    name: str, lengths: Sequence[Sequence[int]], rewards: Sequence[float | None] | None = None, *, version: int = 0
) -> Group:
    """`lengths[e]` are the lengths of the trajectories of episode `e`; a reward of None is a failed episode."""
    rewards = [float(e % 2) for e in range(len(lengths))] if rewards is None else rewards
    return Group(
        id=name,
        prompt_id=f"p-{name}",
        episodes=tuple(
            Episode(
                id=f"{name}/{e}",
                prompt_id=f"p-{name}",
                group_id=name,
                outcome=Outcome.INFRA_ABORT if reward is None else Outcome.GRADED,
                reward=reward,
                error="the engine is gone" if reward is None else None,
                trajectories=tuple(
                    make_trajectory(f"{name}/{e}.{t}", length, version=version, seed=17 * e + t)
                    for t, length in enumerate(lengths[e])
                ),
            )
            for e, reward in enumerate(rewards)
        ),
    )
