"""Which groups may be the next batch: full, oldest first, and not at the cost of a group that still runs."""

from __future__ import annotations

from miles_rollout.config import RolloutConfig
from miles_rollout.errors import BufferClosedError, BufferStateError
from miles_rollout.policies import rest_can_wait

from .queue import GroupQueue, QueuedGroup


class BatchRule:
    """Chooses the batch that `GroupBuffer.take` hands out, and says when none can come any more."""

    def __init__(self, config: RolloutConfig) -> None:
        self._groups_per_step = config.groups_per_step
        self._max_staleness = config.max_staleness
        self._waits = config.stragglers == "wait"

    def choose(self, queue: GroupQueue, *, version: int) -> list[QueuedGroup] | None:
        """The next batch; None while it is not full or has to wait for a straggler."""
        batch = queue.admitted()[: self._groups_per_step]
        if len(batch) < self._groups_per_step or not self._may_leave(queue, batch, version=version):
            return None
        return batch

    def require_possible(self, queue: GroupQueue, *, finished: str | None) -> None:
        """Raise where no batch can come, however long `take` waits.

        Args:
            finished: why nothing will be issued any more; None while something will.

        Raises:
            BufferClosedError: no further group can come.
            BufferStateError: earlier batches were not released, so a full one cannot come.
        """
        wanted, num_admitted = self._groups_per_step, queue.num_admitted
        if finished is not None and not queue.num_running and num_admitted < wanted:
            raise BufferClosedError(
                f"A batch needs {wanted} groups, {num_admitted} are ready and none is running: {finished}."
            )
        taken = queue.num_taken
        if queue.num_credits - taken < wanted:
            raise BufferStateError(
                f"{taken} taken groups hold {taken} of {queue.num_credits} credits, so a batch of {wanted} "
                "cannot come. Call `release` after each step, or raise `max_staleness`."
            )

    def _may_leave(self, queue: GroupQueue, batch: list[QueuedGroup], *, version: int) -> bool:
        """Whether a step on `batch` leaves no other open group too old to be trained."""
        if not self._waits or not queue.num_running:
            return True
        chosen = {group.id for group in batch}
        rest = [g.oldest_version for g in queue if not g.is_taken and not g.is_waiting and g.id not in chosen]
        return rest_can_wait(
            rest, version=version, max_staleness=self._max_staleness, groups_per_step=self._groups_per_step
        )
