"""A chart as data, and the scales that place it in a square of 1000 by 1000."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

SIZE = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, set of points, or layer of a stack. Values that are nan are gaps."""

    name: str
    values: Sequence[float]
    """[N], one for each x of the chart."""
    colour: int = 1
    """1 to 7, a colour of the style sheet; 7 is grey."""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    """[N] each: a band around a line, an error bar on points."""
    kind: Literal["line", "points"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What one figure shows."""

    title: str
    note: str
    """One sentence under the title."""
    x: Sequence[float]
    """[N] increasing."""
    series: Sequence[Series]
    metrics: Sequence[str] = ()
    """Names of what it draws, families as `part/*`; the report shows all other metrics under "More"."""
    layout: Literal["lines", "stack", "bars"] = "lines"
    """stack and bars add the series up."""
    log: bool = False
    floor: float | None = None
    ceiling: float | None = None
    """The y axis reaches at least down to `floor` and up to `ceiling`."""
    limit: tuple[float, str] | None = None
    """A dashed line at a value, with its name."""
    size: Literal["wide", "normal", "small"] = "normal"
    unit: str = ""
    x_name: str = "step"
    """What the x axis counts."""

    def is_empty(self) -> bool:
        return not any(math.isfinite(value) for series in self.series for value in series.values)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to 0 … 1000. `ticks` are values worth a label."""

    start: float
    end: float
    log: bool = False
    ticks: Sequence[float] = field(default=())

    def __call__(self, value: float) -> float:
        if self.log:
            value, start, end = math.log10(max(value, self.start)), math.log10(self.start), math.log10(self.end)
        else:
            start, end = self.start, self.end
        return SIZE * (value - start) / (end - start)


def value_scale(chart: Chart) -> Scale:
    """The y scale: round ends, every finite value inside."""
    values = [value for value in _extremes(chart) if math.isfinite(value)]
    if chart.log:
        return _log_scale([value for value in values if value > 0])
    values += [v for v in (chart.floor, chart.ceiling) if v is not None]
    return _linear_scale(min(values), max(values), count=3 if chart.size == "small" else 5)


def step_scale(chart: Chart) -> Scale:
    """The x scale: whole steps; bars get half a step of room on both sides."""
    start, end = chart.x[0], chart.x[-1]
    room = 0.5 if chart.layout == "bars" or start == end else 0.0
    step = _nice_step(max(end - start, 1) / (2 if chart.size == "small" else 6), whole=True)
    ticks = _multiples(step, start, end)
    return Scale(start - room, end + room, ticks=ticks)


def format_number(value: float) -> str:
    """Short and readable: 0.53, 41.2, 1.2k, 3.4M, 3.1e-6."""
    if not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    for bound, letter in ((1e6, "M"), (1e4, "k")):
        if size >= bound:
            return f"{_trim(value / (bound if letter == 'M' else 1e3), 3)}{letter}"
    return _trim(value, 4 if size >= 1000 else 3)


def _trim(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    if "e" in text:
        text = f"{value:.0f}"
    return text


def _extremes(chart: Chart) -> Iterable[float]:
    if chart.layout != "lines":
        yield 0.0
        yield from (
            sum(v for v in column if math.isfinite(v)) for column in zip(*(s.values for s in chart.series), strict=True)
        )
        return
    for series in chart.series:
        yield from series.values
        yield from series.low or ()
        yield from series.high or ()
    if chart.limit is not None:
        yield chart.limit[0]


def _linear_scale(low: float, high: float, *, count: int) -> Scale:
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal, or equal but for rounding
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _nice_step((high - low) / (count - 1))
    start, end = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(start, end, ticks=_multiples(step, start, end))


def _log_scale(values: Sequence[float]) -> Scale:
    if not values:
        return Scale(0.1, 1.0, log=True, ticks=(0.1, 1.0))
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 5))
    return Scale(10.0**low, 10.0**high, log=True, ticks=[10.0**p for p in range(low, high + 1, every)])


def _nice_step(raw: float, *, whole: bool = False) -> float:
    """The smallest of 1, 2, 5 times 10^n that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return max(1.0, round(step)) if whole else step


def _multiples(step: float, start: float, end: float) -> list[float]:
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [n * step for n in range(first, last + 1)]
