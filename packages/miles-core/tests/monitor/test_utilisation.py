from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_core.monitor.usage import Span, busy_fraction, busy_seconds, utilisation


def span(start: float, end: float, lane: str = "a") -> Span:
    return Span("work", start, end, lane)


def test_overlapping_spans_count_once_and_are_cut_to_the_window():
    spans = [span(0, 2), span(1, 3), span(5, 9)]
    assert busy_seconds(spans, start=1, end=6) == pytest.approx(2 + 1)
    assert busy_fraction(spans, start=1, end=6) == pytest.approx(0.6)


def test_an_empty_window_is_idle():
    assert busy_fraction([span(0, 1)], start=1, end=1) == 0.0


def test_a_part_is_the_mean_of_its_lanes_and_a_silent_lane_is_idle():
    spans = [span(0, 10, "engine/0"), span(0, 5, "engine/1"), span(2, 4, "trainer")]
    lanes = {"engine": ["engine/0", "engine/1", "engine/2"], "trainer": ["trainer"], "sync": []}
    result = utilisation(spans, lanes, start=0, end=10)
    assert result == {"engine": pytest.approx(0.5), "trainer": pytest.approx(0.2), "sync": 0.0}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
def test_the_union_equals_a_count_of_unit_cells(pairs):
    spans = [span(min(pair), max(pair)) for pair in pairs]
    cells = np.zeros(40, dtype=bool)
    for s in spans:
        cells[int(s.start) : int(s.end)] = True
    assert busy_seconds(spans, start=5, end=30) == pytest.approx(cells[5:30].sum())
