"""How busy a part was, from the spans that it reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Something took from `start` to `end` (seconds since the epoch) in `lane`."""

    name: str
    start: float
    end: float
    lane: str


def busy_seconds(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Length of the union of `spans` within the window: overlapping spans count once."""
    clipped = sorted((max(s.start, start), min(s.end, end)) for s in spans)
    busy = 0.0
    reached = start
    for left, right in clipped:
        left = max(left, reached)
        if right > left:
            busy += right - left
            reached = right
    return busy


def busy_fraction(spans: Iterable[Span], *, start: float, end: float) -> float:
    """Share of the window in which at least one span was open; 0 for an empty window."""
    return busy_seconds(spans, start=start, end=end) / (end - start) if end > start else 0.0


def utilisation(
    spans: Sequence[Span], lanes: Mapping[str, Sequence[str]], *, start: float, end: float
) -> dict[str, float]:
    """The busy fraction of each part, averaged over its lanes.

    Args:
        spans: what the run recorded, in any order.
        lanes: part -> its lanes, e.g. `{"engine": ["engine/0", "engine/1"], "trainer": ["trainer"]}`. A lane without
            spans was idle and counts as 0.
        start, end: the window, seconds since the epoch.

    Returns:
        part -> share of the window, 0 to 1.
    """
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    return {
        part: sum(busy_fraction(by_lane.get(lane, ()), start=start, end=end) for lane in names) / max(len(names), 1)
        for part, names in lanes.items()
    }
