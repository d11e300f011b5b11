"""What the trainer ranks know about engines, and how an engine that comes back is known again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..collective import Ranks
from ..engine import Deadline
from ..errors import WeightSyncError
from .link import Link
from .sender import PieceChecksums, piece_checksums
from .tables import EnginePlan, EngineShape
from .values import Snapshot


@dataclass(frozen=True, slots=True)
class Engine:
    """What every rank hears about an engine."""

    url: str
    key: str
    shape: EngineShape | None
    """Only when the ranks have not seen its key before."""
    content: str | None
    claims: int | None
    """Version that it says it has loaded itself."""
    error: str | None
    """Why it cannot be pushed to."""


Check = Callable[[Engine, EnginePlan, Sequence[PieceChecksums]], bool]
"""Whether the live parameters of an engine have the checksums that the trainer ranks expect."""


def recognise(
    engines: tuple[Engine, ...],
    plans: Sequence[EnginePlan | str],
    *,
    ranks: Ranks,
    snapshot: Snapshot,
    check: Check,
    links: Mapping[str, Link],
    deadline: Deadline,
) -> tuple[Engine, ...]:
    """Engines that started from the checkpoint of a version that was pushed need no full push: what they say is
    checked, and is what they serve from here on. Collective; the leader alone has `links` and calls `check`."""
    claims = {
        index: (plan, engine.claims)
        for index, (engine, plan) in enumerate(zip(engines, plans, strict=True))
        if isinstance(plan, EnginePlan) and engine.claims is not None
    }
    if not claims:  # alike on every rank
        return engines

    def expected() -> dict[int, PieceChecksums | None]:
        found: dict[int, PieceChecksums | None] = {}
        for index, (plan, version) in claims.items():
            base = snapshot.at(snapshot.named(version) or "")
            found[index] = base and piece_checksums(base, plan.loads.get(ranks.rank, ()))
        return found

    sums_R = ranks.agree("encode", expected)

    def known(index: int) -> Engine:
        engine, (plan, version) = engines[index], claims[index]
        sums = [of for sums in sums_R if (of := sums[index]) is not None]
        content = snapshot.named(version)
        if len(sums) < len(sums_R) or content is None:
            return engine
        try:
            if check(engine, plan, sums):
                links[engine.url].adopt(version, content, deadline)
                return replace(engine, content=content)
        except WeightSyncError:
            pass  # a full push finds what is wrong with it, if anything is
        return engine

    def look() -> tuple[Engine, ...]:
        if not ranks.is_leader:
            return ()
        return tuple(known(index) if index in claims else engine for index, engine in enumerate(engines))

    return ranks.agree("encode", look)[0]
