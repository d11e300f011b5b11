"""The bounded, staleness-aware buffer between rollout and training."""

from .buffer import GroupBuffer

__all__ = ["GroupBuffer"]
