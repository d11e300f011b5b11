"""Draws the timeline as heat: one row a lane, one column a bin."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np

from miles_core.monitor.summary import format_seconds
from miles_core.text import visible

from .happenings import clock
from .markup import section
from .text import safe
from .timeline import Lane, Timeline

LEVELS = 6
MOST_MARKS = 200


def timeline_section(timeline: Timeline | None) -> str:
    if timeline is None or not timeline.lanes:
        return ""
    bins = len(timeline.lanes[0].heat)
    width = (timeline.end - timeline.begin) / bins
    rows = "".join(_lane(lane, bins) for lane in timeline.lanes)
    figure = (
        f'<figure class="timeline" {_data(timeline, width)}><div class="lanes">{rows}<div class="over">'
        f'<div class="cursor"></div></div>{_marks(timeline)}</div>{_ticks(timeline)}</figure>'
    )
    note = (
        f"The stronger the colour, the busier. A column is {format_seconds(width)}: for workers the groups that ran at "
        "once, of the most that any worker ran; for all others the share of the time. Lines are starts, orange ones "
        "went back."
    )
    return section("Timeline", note, f'<div class="card">{figure}</div>')


def _lane(lane: Lane, bins: int) -> str:
    """Neighbours of one level are one rectangle; a path for each level."""
    levels = np.ceil(lane.heat * LEVELS - 1e-9).clip(0, LEVELS).astype(int)
    levels[(lane.heat > 0) & (levels == 0)] = 1
    edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), bins]
    paths: dict[int, list[str]] = {}
    for begin, end in itertools.pairwise(edges):
        if level := int(levels[begin]):
            paths.setdefault(level, []).append(f"M{begin} 0H{end}V1H{begin}Z")
    shapes = "".join(f'<path class="h{level}" d="{"".join(d)}"/>' for level, d in sorted(paths.items()))
    return (
        f'<div class="lane"><span>{safe(lane.name)}</span><svg viewBox="0 0 {bins} 1" preserveAspectRatio="none" '
        f'role="img" aria-label="{safe(lane.name)}">{shapes}</svg></div>'
    )


def _marks(timeline: Timeline) -> str:
    whole = timeline.end - timeline.begin
    lines = "".join(
        f'<i class="mark{" back" if mark.is_rewind else ""}" title="{safe(mark.text)}" '
        f'style="left:{100 * (mark.at - timeline.begin) / whole:.2f}%"></i>'
        for mark in timeline.marks[-MOST_MARKS:]
    )
    return f'<div class="marks">{lines}</div>'


def _ticks(timeline: Timeline) -> str:
    """Six moments, as time since the beginning; the first as a date."""
    whole = timeline.end - timeline.begin
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(timeline.begin))
    labels = [began, *(clock(whole * i / 5) for i in range(1, 6))]
    return f'<div class="ticks">{"".join(f"<span>{safe(label)}</span>" for label in labels)}</div>'


def _data(timeline: Timeline, width: float) -> str:
    bins = len(timeline.lanes[0].heat)
    data = {
        "left": [round((i + 0.5) / bins * 100, 2) for i in range(bins)],
        "what": "after ",
        "step": [clock((i + 0.5) * width) for i in range(bins)],
        "series": [
            {"name": visible(lane.name), "colour": 0, "values": [visible(label) for label in lane.labels]}
            for lane in timeline.lanes
        ],
    }
    return f'data-chart="{safe(json.dumps(data, ensure_ascii=False, separators=(",", ":")))}"'
