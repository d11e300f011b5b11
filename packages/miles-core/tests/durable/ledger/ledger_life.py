"""The events that lead a group through its life, as buffer, spool and loop send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles_core.durable.ledger import Ledger
from miles_rollout.fates import Fate, FateEvent
from miles_tito.records import FailedAttempt, Outcome
from miles_tito.records.summary import EpisodeSummary, GroupRef, TrajectorySummary


def event(name: str, fate: Fate, *, version: int = 0, reason: str = "", **more: object) -> FateEvent:
    return FateEvent(group_id=name, prompt_id=f"p-{name}", fate=fate, reason=reason, version=version, **more)  # pyright: ignore


def make_ref(
    name: str,
    *,
    oldest: int | None = 0,
    newest: int | None = None,
    attempt: int = 0,
    rewards: Sequence[float | None] = (0.0, 1.0),
    place: tuple[str, int] | None = None,
) -> GroupRef:
    """A finished group; a reward of None is a failed episode."""
    place = place or ("worker-0.000.spool", abs(hash(name)) % 10**6)

    def episode(index: int, reward: float | None) -> EpisodeSummary:
        trajectory = TrajectorySummary(
            id=f"{name}-{index}.{attempt}:0",
            num_tokens=10,
            num_loss_tokens=6,
            oldest_version=oldest,
            newest_version=oldest if newest is None else newest,
            finish_reason="stop",
        )
        return EpisodeSummary(
            id=f"{name}/{index}",
            outcome=Outcome.INFRA_ABORT if reward is None else Outcome.GRADED,
            reward=reward,
            error="ConnectionError: the sandbox is gone" if reward is None else None,
            attempt=attempt,
            seconds=2.0,
            metrics={},
            trajectories=() if reward is None else (trajectory,),
            finished_at=1_000_000.0,
        )

    return GroupRef(
        id=name,
        prompt_id=f"p-{name}",
        episodes=tuple(episode(index, reward) for index, reward in enumerate(rewards)),
        metadata={"spool": place},
    )


def issue(ledger: Ledger, *names: str, version: int = 0, **more: object) -> None:
    for name in names:
        ledger(event(name, Fate.IN_FLIGHT, version=version, **more))


def finish(ledger: Ledger, *names: str, version: int = 0, **more: object) -> None:
    """Spooled and admitted."""
    for name in names:
        ledger.finished(make_ref(name, **more))  # pyright: ignore[reportArgumentType]
        ledger(event(name, Fate.BUFFERED, version=version))


def train(ledger: Ledger, version: int, *names: str) -> None:
    for name in names:
        ledger(event(name, Fate.TRAINED, version=version))
    ledger.step(version, [make_ref(name) for name in names])


def reopen(ledger: Ledger) -> Ledger:
    """As after the end of the process."""
    path = ledger._path  # pyright: ignore[reportPrivateUsage]
    ledger.close()
    return Ledger.open(path)


def with_failed_attempts(ref: GroupRef, *errors: str) -> GroupRef:
    """`ref`, whose first episode failed before with these errors."""
    failed = tuple(
        FailedAttempt(attempt=n, outcome=Outcome.INFRA_ABORT, error=error, seconds=1.0, finished_at=999_990.0 + n)
        for n, error in enumerate(errors)
    )
    first = replace(ref.episodes[0], attempt=len(errors), failed_attempts=failed)
    return replace(ref, episodes=(first, *ref.episodes[1:]))
