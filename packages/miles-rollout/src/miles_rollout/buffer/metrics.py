"""What the buffer measures about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .queue import QueuedGroup


class BufferMeter:
    """Counts since the last snapshot, which the loop takes once a step."""

    finished: int
    """Groups put."""
    discarded: Counter[str]
    """Groups discarded, by reason."""

    def __init__(self) -> None:
        self._reset()

    def took(self, batch: Sequence[QueuedGroup], *, version: int, wait_s: float) -> None:
        """A batch was handed out after `wait_s` seconds."""
        self._staleness += [group.trained_staleness(version) for group in batch]
        self._num_masked += sum(len(group.masked) for group in batch)
        self._wait_s += wait_s

    def snapshot(self) -> dict[str, float]:
        """The counts as metrics; starts again from 0."""
        metrics = {
            "buffer/finished": float(self.finished),
            "buffer/discard_rate": self.discarded.total() / self.finished if self.finished else 0.0,
            "buffer/take_wait_s": self._wait_s,
            "buffer/masked_episodes": float(self._num_masked),
        }
        if self._staleness:
            metrics["buffer/staleness_mean"] = sum(self._staleness) / len(self._staleness)
            metrics["buffer/staleness_max"] = float(max(self._staleness))
        metrics |= {f"buffer/discarded/{reason}": float(count) for reason, count in self.discarded.items()}
        self._reset()
        return metrics

    def _reset(self) -> None:
        self.finished = 0
        self.discarded = Counter()
        self._staleness: list[int] = []
        self._num_masked = 0
        self._wait_s = 0.0
