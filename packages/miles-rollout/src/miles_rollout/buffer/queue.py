"""The groups that hold credits: running, admitted, or in a batch that is not committed. And prompts that run again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from miles_tito import GroupRef, Prompt

from miles_rollout.policies import MASKED_EPISODES
from miles_rollout.resume import Retry


@dataclass(slots=True, kw_only=True)
class QueuedGroup:
    """A group from its issue to its final fate, with what the buffer knows of it."""

    id: str
    order: int
    prompt: Prompt
    issued_version: int
    ref: GroupRef | None = None
    """Its result, once it was put."""
    is_waiting: bool = False
    """Left by a run that stopped, without a result: holds no credit until it is issued again."""
    is_resumed: bool = False
    """Left by a run that stopped, with a result: what makes it too old is the stop."""
    is_taken: bool = False

    @property
    def is_running(self) -> bool:
        return self.ref is None and not self.is_waiting

    @property
    def is_admitted(self) -> bool:
        """Finished, and not taken yet."""
        return self.ref is not None and not self.is_taken

    @property
    def oldest_version(self) -> int:
        """Of its oldest token; of its issue where the engine named no version, since no token is older than that."""
        oldest = None if self.ref is None else self.ref.oldest_version
        if self.ref is None or oldest is None:
            return self.issued_version
        return oldest if self.ref.is_versioned else min(oldest, self.issued_version)

    @property
    def masked(self) -> tuple[str, ...]:
        """Ids of episodes that are not trained."""
        return self.ref.metadata.get(MASKED_EPISODES, ()) if self.ref is not None else ()

    def staleness(self, version: int) -> int:
        """Versions that its oldest token is behind `version`."""
        return max(0, version - self.oldest_version)

    def trained_staleness(self, version: int) -> int:
        """Of the oldest token that will be trained: masked episodes do not count."""
        if self.ref is None or not self.masked:
            return self.staleness(version)
        fresh = [e.oldest_version for e in self.ref.episodes if e.id not in self.masked]
        return max((version - oldest for oldest in fresh if oldest is not None), default=0)


class GroupQueue:
    """Open groups by id, and the credits that they hold; `GroupBuffer` has one."""

    def __init__(self, num_credits: int) -> None:
        self.num_credits = num_credits
        self.reserved = 0
        """Credits acquired for groups that are not issued yet."""
        self._groups: dict[str, QueuedGroup] = {}

    def __getitem__(self, group_id: str) -> QueuedGroup:
        return self._groups[group_id]

    def __iter__(self) -> Iterator[QueuedGroup]:
        """In the order of their issue; groups may be removed meanwhile."""
        return iter(list(self._groups.values()))

    def add(self, group: QueuedGroup) -> None:
        self._groups[group.id] = group

    def remove(self, group_id: str) -> QueuedGroup:
        return self._groups.pop(group_id)

    @property
    def credits_used(self) -> int:
        return self.reserved + sum(not group.is_waiting for group in self._groups.values())

    @property
    def num_running(self) -> int:
        return sum(group.is_running for group in self._groups.values())

    @property
    def num_taken(self) -> int:
        return sum(group.is_taken for group in self._groups.values())

    @property
    def num_admitted(self) -> int:
        return sum(group.is_admitted for group in self._groups.values())

    def admitted(self) -> list[QueuedGroup]:
        """Admitted groups that are not taken, oldest first."""
        admitted = [group for group in self._groups.values() if group.is_admitted]
        return sorted(admitted, key=lambda group: (group.oldest_version, group.order))


class RetryQueue:
    """Prompts of discarded groups that run again, each at most `group_retries` times in a row."""

    def __init__(self, group_retries: int) -> None:
        self._group_retries = group_retries
        self._waiting: deque[Retry] = deque()
        self._in_a_row: Counter[str] = Counter()
        """Retries since a prompt's last good group, by prompt id."""

    def extend(self, retries: Iterable[Retry]) -> None:
        self._waiting.extend(retries)

    def next(self) -> Retry | None:
        """The prompt that waits for the longest; None when there is none."""
        return self._waiting.popleft() if self._waiting else None

    def allows(self, group: QueuedGroup) -> bool:
        """Whether the prompt of a discarded group may run again. A stop of the run is not the prompt's fault."""
        return group.is_resumed or self._in_a_row[group.prompt.id] < self._group_retries

    def add(self, group: QueuedGroup) -> None:
        self._in_a_row[group.prompt.id] += 1
        self._waiting.append(Retry(prompt=group.prompt, retry_of=group.id))

    def clear(self, group: QueuedGroup) -> None:
        """Its prompt was trained or given up: the next group of it may be retried as often as the first."""
        self._in_a_row.pop(group.prompt.id, None)
