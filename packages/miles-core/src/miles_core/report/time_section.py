"""Draws where the wall time went."""

from __future__ import annotations

from miles_core.monitor.summary import format_seconds

from .effective import KINDS, WITHIN, TimeSplit
from .markup import Share, card, percent, section, shares

_DID = dict(zip(WITHIN, ("waited for groups", "trained", "updated the engines' weights"), strict=True))


def time_section(split: TimeSplit | None) -> str:
    """Nothing where nothing has happened yet."""
    if split is None or split.ratio is None:
        return ""
    parts = [
        Share(name=name, value=split.seconds[kind], text=format_seconds(split.seconds[kind]), colour=colour)
        for kind, (name, colour) in KINDS.items()
        if split.seconds[kind] > 0 or kind == "steps"
    ]
    useful, wall = format_seconds(split.seconds["steps"]), format_seconds(split.wall)
    note = (
        f"Effective training time ratio {percent(split.ratio)}: of {wall} from the first start to the last event, "
        f"{useful} are steps of the surviving lineage."
    )
    inner = sum(split.within.values())
    if inner > 0:
        told = (f"{name} {percent(split.within[key] / inner)}" for key, name in _DID.items())
        note += f" In those steps the trainer {', '.join(told)}."
    return section("Where the time went", note, card(shares(parts)))
