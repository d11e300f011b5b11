"""New weights from any trainer's shards into every SGLang engine, verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import PushConfig
from .errors import EngineRequestError, PushConfigError, ShardError, StagingError, SyncError, WeightSyncError
from .report import EngineOutcome, SyncReport
from .shard import Shard
from .shm import required_bytes, shm_free_bytes

if TYPE_CHECKING:
    from .push import Pusher
    from .stored.follow import Follower

__all__ = [
    "EngineOutcome",
    "EngineRequestError",
    "Follower",
    "PushConfig",
    "PushConfigError",
    "Pusher",
    "Shard",
    "ShardError",
    "StagingError",
    "SyncError",
    "SyncReport",
    "WeightSyncError",
    "required_bytes",
    "shm_free_bytes",
]


def __getattr__(name: str) -> object:
    if name == "Pusher":  # this and `Follower` are the only names that need torch
        from .push import Pusher

        return Pusher
    if name == "Follower":
        from .stored.follow import Follower

        return Follower
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
