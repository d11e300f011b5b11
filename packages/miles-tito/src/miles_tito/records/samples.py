"""Episodes to training samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from miles_tito.errors import SampleError

from . import Episode, Sample, Trajectory


def to_samples(episode: Episode, advantage: float | Mapping[str, np.ndarray]) -> list[Sample]:
    """One sample a trajectory that has a trained token.

    Each carries the loss tokens of the whole episode as `loss_denominator`: an episode weighs the same however many
    trajectories its agent made of it.

    Args:
        episode: graded, or at the policy's limit.
        advantage: one number for all tokens, or [T] values for each trajectory id.

    Raises:
        SampleError: the episode has no reward, or `advantage` misses a trajectory.
    """
    if not episode.outcome.has_reward:
        raise SampleError(
            f"Episode {episode.id} ended as {episode.outcome} ({episode.error}) and has no reward, so it cannot be "
            "trained; leave it out of the batch."
        )
    trained = [t for t in episode.trajectories if t.num_loss_tokens]
    if isinstance(advantage, Mapping):
        missing = [t.id for t in trained if t.id not in advantage]
        if missing:
            raise SampleError(
                f"`advantage` has {len(advantage)} trajectories but not {', '.join(missing)} of episode {episode.id}."
            )
    return [
        Sample(
            id=t.id,
            episode_id=episode.id,
            group_id=episode.group_id,
            prompt_id=episode.prompt_id,
            tokens=t.tokens,
            loss_mask=t.loss_mask,
            logprobs=t.logprobs,
            advantage=advantage[t.id] if isinstance(advantage, Mapping) else float(advantage),
            loss_denominator=episode.loss_denominator,
            versions=t.versions,
            temperature=t.temperature,
            reward=episode.reward,
            routed_experts=t.routed_experts,
            routed_mask=t.routed_mask,
            routed_layers=t.routed_layers,
            multimodal=t.multimodal,
            metadata={**t.metadata, "kind": str(t.kind), "finish_reason": str(t.finish_reason)},
        )
        for t in trained
    ]


def mask_older_versions(trajectory: Trajectory) -> Trajectory:
    """Train only the tokens that the newest weights sampled; those of older ones stay as context.

    For a trajectory that went on while the weights changed under it: what is left was sampled by one version, and the
    staleness of the trajectory is that version's.
    """
    newest = trajectory.newest_version
    if newest is None or newest == trajectory.oldest_version:
        return trajectory
    mask = np.zeros_like(trajectory.loss_mask)
    for span in trajectory.versions:
        if span.version == newest:
            mask[span.start : span.end] = trajectory.loss_mask[span.start : span.end]
    return replace(trajectory, loss_mask=mask)
