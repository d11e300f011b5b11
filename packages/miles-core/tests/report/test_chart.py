from __future__ import annotations

import json
import math
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_core.report.chart import SIZE, Chart, Series, format_number, step_scale, value_scale
from miles_core.report.svg import draw

finite = st.floats(-1e12, 1e12, allow_nan=False)


def chart(values, **options) -> Chart:
    x = list(range(1, len(values) + 1))
    return Chart(title="t", note="", x=x, series=[Series(name="s", values=values)], **options)


@given(st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=20), st.sampled_from(["lines", "bars"]))
def test_every_finite_value_lies_on_the_canvas_between_two_to_twelve_ticks(values, layout):
    if layout == "bars":
        values = [abs(v) for v in values]
    drawn = chart(values, layout=layout)
    if drawn.is_empty():
        return
    scale = value_scale(drawn)
    for value in values:
        assert math.isnan(value) or -1e-6 <= scale(value) <= SIZE + 1e-6
    assert 2 <= len(scale.ticks) <= 12
    assert all(-1e-6 <= scale(tick) <= SIZE + 1e-6 for tick in scale.ticks)


@given(st.lists(st.floats(1e-12, 1e3), min_size=1, max_size=20))
def test_a_log_scale_holds_every_positive_value(values):
    scale = value_scale(chart([*values, 0.0, -1.0], log=True))
    assert all(-1e-6 <= scale(value) <= SIZE + 1e-6 for value in values)


def test_ticks_are_round():
    assert value_scale(chart([0.31, 0.93], floor=0)).ticks == pytest.approx([0, 0.5, 1.0])
    assert step_scale(chart([0.0] * 40)).ticks == [10, 20, 30, 40]


def test_a_constant_and_a_single_step_still_have_a_scale():
    assert value_scale(chart([5.0, 5.0])).start < 5.0 < value_scale(chart([5.0, 5.0])).end
    assert step_scale(chart([1.0]))(1) == SIZE / 2
    assert "path" in draw(chart([5.9, 5.9 + 1e-15])), "means of equal values differ in the last digit"


def test_a_stack_reaches_up_to_the_sum():
    both = Chart(
        title="t",
        note="",
        x=[1, 2],
        series=[Series(name="a", values=[1, 2]), Series(name="b", values=[3, math.nan])],
        layout="stack",
    )
    assert value_scale(both).end == 4
    assert draw(both).count('class="area') == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.53, "0.53"),
        (41.23, "41.2"),
        (999.6, "1000"),
        (1234, "1234"),
        (12345, "12.3k"),
        (3.4e6, "3.4M"),
        (3.14e-6, "3.1e-6"),
        (-2e-4, "-2e-4"),
        (5e12, "5e12"),
        (math.nan, "\N{EN DASH}"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_the_pointer_finds_the_values_as_text():
    html = draw(chart([0.5, math.nan], unit=" s"))
    data = json.loads(unescape(html.split('data-chart="')[1].split('"')[0]))
    assert data["step"] == ["1", "2"]
    assert data["series"][0]["values"] == ["0.5 s", "\N{EN DASH} s"]


def test_a_chart_without_values_says_so():
    assert "not measured" in draw(chart([math.nan]))
    assert "not measured" in draw(Chart(title="t", note="", x=[1], series=[]))
