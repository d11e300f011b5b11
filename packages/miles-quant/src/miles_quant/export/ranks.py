"""What shards need of the other ranks, over torch.distributed."""

from __future__ import annotations

import torch.distributed as dist


def largest_over_ranks(local: dict[str, float]) -> dict[str, float]:
    """The maximum of every key over the ranks of the default group, any of which may lack keys; a `reduce_max`.

    Collective. Without a process group this rank is alone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return local
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, local)
    return {key: max(held.get(key, 0.0) for held in everyone) for key in {key for held in everyone for key in held}}
