"""Comparing every parameter of an engine with the trainer's shards, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..engine import Deadline, EngineClient
from ..errors import SyncError, WeightSyncError
from ..wire import Message
from .link import Link
from .tables import EnginePlan

if TYPE_CHECKING:
    from ..config import Pause


_RESUME_S = 15.0
"""How long to try to have an engine serve again after a check that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How the parameters of one engine compare with the shards."""

    num_equal: int
    """Pieces with equal checksums, over all ranks of the engine."""
    different: tuple[str, ...]
    """Parameters that differ, with the checkpoint tensor and the rank."""
    missing: tuple[str, ...]
    """Parameters that no tensor fills."""
    padding: tuple[str, ...]
    """Parameters whose padding is not zero."""
    stale: tuple[str, ...]
    """Derived tensors that do not follow from the live parameters. They were made anew by looking."""
    unused: tuple[str, ...]
    """Tensors of the trainer that the engine does not load."""

    @property
    def is_equal(self) -> bool:
        """Every parameter is the trainer's, and everything derived from them is up to date."""
        return not (self.different or self.missing or self.padding or self.stale)


def run_check(client: EngineClient, link: Link, plan: EnginePlan, *, pause: Pause, deadline: Deadline) -> list[Message]:
    """Have every rank hash its pieces while the engine is paused. One that must stay paused does.

    Raises:
        SyncError, EngineRequestError: it did not.
    """
    if link.known_plan != plan.id:
        link.ask([{"op": "table", "table": table.to_json()} for table in plan.tables_R], deadline)
        link.known_plan = plan.id
    link.is_held = True
    try:
        client.pause("in_place" if pause == "abort" else pause, deadline)
        client.open_session(deadline)
        outcomes = link.command("check", deadline, plan=plan.id)
    finally:
        with suppress(WeightSyncError):  # the next push tries again
            link.let_go(Deadline(_RESUME_S))
    problems = [
        f"rank {rank}: {(outcome or {}).get('error', 'it did not run')}"
        for rank, outcome in enumerate(outcomes)
        if outcome is None or outcome.get("error")
    ]
    if problems:
        raise SyncError(f"{client.url} could not be checked: {'; '.join(problems)}", phase="verify")
    return cast("list[Message]", outcomes)


def compare(
    plan: EnginePlan,
    sums_S: Sequence[Sequence[tuple[int, int, list[str]]]],
    answers_R: Sequence[Mapping[str, list[str]]],
) -> Differences:
    """Set the trainer's checksums against the engine's.

    Args:
        sums_S: for each trainer rank, (engine rank, bucket, checksum of every piece).
        answers_R: for each engine rank, what it found.
    """
    expected = {(dst, index): sums for of_rank in sums_S for dst, index, sums in of_rank}
    num_equal = 0
    different: list[str] = []
    for dst, (table, answer) in enumerate(zip(plan.tables_R, answers_R, strict=True)):
        pieces = [piece for bucket in table.buckets for piece in bucket.pieces]
        wanted = [each for index in range(len(table.buckets)) for each in expected[dst, index]]
        for piece, name, mine, theirs in zip(pieces, plan.names_R[dst], wanted, answer["sums"], strict=True):
            if mine == theirs:
                num_equal += 1
            else:
                different.append(f"{piece.param} ({name}) on rank {dst}")

    def every(key: str, known: frozenset[str] = frozenset()) -> tuple[str, ...]:
        found = [(name, dst) for dst, answer in enumerate(answers_R) for name in answer[key] if name not in known]
        return tuple(f"{name} on rank {dst}" for name, dst in found)

    filled = frozenset(piece.param for table in plan.tables_R for bucket in table.buckets for piece in bucket.pieces)
    return Differences(
        num_equal=num_equal,
        different=tuple(dict.fromkeys(different)),
        missing=every("missing", filled),  # what is filled on other ranks is all padding here
        padding=every("padding"),
        stale=every("stale"),
        unused=plan.unused,
    )
