"""The bounded, staleness-aware buffer between rollout and training.

buffer       GroupBuffer: fates, and who waits for a credit or a batch
queue        open groups and their credits; prompts that run again
admission    failure policy, filter, stale policies
batches      which batch may be taken
stop_rules   when a run is stopped with advice
metrics      what the buffer measures about itself
"""

from .buffer import GroupBuffer

__all__ = ["GroupBuffer"]
