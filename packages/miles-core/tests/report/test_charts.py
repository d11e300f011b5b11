from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_core.report.charts import Axis, Chart, Series, drawable, x_axis, y_axis
from miles_core.report.page import embedded, format_number

finite = st.floats(-1e12, 1e12, allow_nan=False)


def chart(values, **options) -> Chart:
    x = list(range(1, len(values) + 1))
    return Chart(title="t", note="", series=[Series(name="s", x=x, values=values)], **options)


def holds(axis: Axis, value: float) -> bool:
    """Whether a value lies on the axis, but for a thousandth of a permille."""
    room = 1e-9 * (axis.end - axis.start)
    return axis.start - room <= value <= axis.end + room


def drawn_from(chart: Chart) -> dict:
    """What the page's script reads."""
    return json.loads(embedded(chart.to_data()))


@given(st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=20), st.sampled_from(["lines", "bars"]))
def test_every_finite_value_lies_on_the_canvas_between_two_to_twelve_ticks(values, layout):
    if layout == "bars":
        values = [abs(v) for v in values]
    drawn = chart(values, layout=layout)
    if drawn.is_empty():
        return
    axis = y_axis(drawn)
    assert all(math.isnan(value) or holds(axis, value) for value in values)
    assert 2 <= len(axis.ticks) <= 12
    assert all(holds(axis, tick) for tick in axis.ticks)


@given(st.lists(st.floats(1e-12, 1e3), min_size=1, max_size=20))
def test_a_log_scale_holds_every_positive_value(values):
    axis = y_axis(chart([*values, 0.0, -1.0], log=True))
    assert axis.start > 0
    assert all(holds(axis, value) for value in values)


def test_ticks_are_round():
    assert y_axis(chart([0.31, 0.93], floor=0)).ticks == pytest.approx([0, 0.5, 1.0])
    assert x_axis(chart([0.0] * 40)).ticks == [10, 20, 30, 40]


def test_a_constant_and_a_single_step_still_have_an_axis():
    assert y_axis(chart([5.0, 5.0])).start < 5.0 < y_axis(chart([5.0, 5.0])).end
    assert (x_axis(chart([1.0])).start, x_axis(chart([1.0])).end) == (0.5, 1.5)
    axis = y_axis(chart([5.9, 5.9 + 1e-15]))
    assert axis.end - axis.start > 0.1, "means of equal values differ in the last digit"


def test_a_stack_reaches_up_to_the_sum():
    series = [Series(name="a", x=[1, 2], values=[1, 2]), Series(name="b", x=[1, 2], values=[3, math.nan])]
    both = Chart(title="t", note="", series=series, layout="stack")
    assert y_axis(both).end == 4
    drawn = drawn_from(both)
    assert (drawn["layout"], [one["values"] for one in drawn["series"]]) == ("stack", [[1, 2], [3, None]])


def test_an_axis_may_show_more_than_its_series():
    assert (x_axis(chart([1.0, 2.0], x_range=(0, 50))).start, x_axis(chart([1.0], x_range=(0, 50))).end) == (0, 50)


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


def test_the_script_gets_what_the_pointer_shows():
    drawn = drawn_from(chart([0.5, math.nan], unit=" s"))
    assert drawn["unit"] == " s"
    assert drawn["series"] == [{"name": "s", "x": [1, 2], "values": [0.5, None]}]


def test_a_chart_without_values_has_no_axes_so_that_the_script_says_so():
    for empty in (chart([math.nan]), Chart(title="t", note="", series=[])):
        assert drawable([empty]) == []
        assert not {"x_axis", "y_axis"} & drawn_from(empty).keys()
