"""Draws a chart: an SVG that stretches to its box, with HTML labels that keep their size at any width."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from miles_core.text import visible

from .chart import SIZE, Chart, Scale, Series, format_number, step_scale, value_scale
from .text import safe


def draw(chart: Chart) -> str:
    """The figure as HTML, empty charts as a quiet note."""
    caption = f"<figcaption><h3>{safe(chart.title)}</h3><p>{safe(chart.note)}</p>{_legend(chart)}</figcaption>"
    if chart.is_empty() or not chart.x:
        return f'<figure class="chart {chart.size}">{caption}<p class="nothing">not measured</p></figure>'
    x, y = step_scale(chart), value_scale(chart)
    shapes = {"lines": _lines, "stack": _stack, "bars": _bars}[chart.layout](chart, x, y)
    grid = "".join(f"M0 {_c(SIZE - y(t))}H{SIZE:.0f}" for t in y.ticks)
    return (
        f'<figure class="chart {chart.size}" {_data(chart, x)}>{caption}<div class="plot">'
        f"{_labels(x, y)}"
        f'<svg viewBox="0 0 {SIZE:.0f} {SIZE:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(chart.title)}"><path class="grid" d="{grid}"/>{"".join(shapes)}{_limit(chart, y)}</svg>'
        f'{_limit_label(chart, y)}<div class="cursor"></div></div></figure>'
    )


def _lines(chart: Chart, x: Scale, y: Scale) -> list[str]:
    shapes: list[str] = []
    for series in chart.series:
        if series.low is not None and series.high is not None:
            band = _band if series.kind == "line" else _error_bars
            shapes.append(band(chart.x, series, x, y))
    for series in chart.series:
        points = _points(chart.x, series.values, x, y)
        shapes.append(f'<path class="line c{series.colour}" d="{_path(points)}"/>')
        if series.kind == "points" or len(chart.x) == 1:
            dots = "".join(f"M{_c(px)} {_c(py)}h0" for px, py in points if not math.isnan(py))
            shapes.append(f'<path class="dot c{series.colour}" d="{dots}"/>')
    return shapes


def _stack(chart: Chart, x: Scale, y: Scale) -> list[str]:
    shapes: list[str] = []
    for series, bottom, top in _layers(chart):
        upper = _points(chart.x, top, x, y)
        lower = _points(chart.x, bottom, x, y)[::-1]
        shapes.append(f'<path class="area c{series.colour}" d="{_path([*upper, *lower])}Z"/>')
    return shapes


def _bars(chart: Chart, x: Scale, y: Scale) -> list[str]:
    shapes: list[str] = []
    middles = [x(step) for step in chart.x]
    edges = [x.start, *((a + b) / 2 for a, b in zip(chart.x, chart.x[1:], strict=False)), x.end]
    lefts = [x(edge) for edge in edges]
    gap = min(0.1 * SIZE / len(middles), 4.0)
    for series, bottom, top in _layers(chart):
        d = "".join(
            f"M{_c(lefts[i] + gap)} {_c(SIZE - y(bottom[i]))}V{_c(SIZE - y(top[i]))}H{_c(lefts[i + 1] - gap)}"
            f"V{_c(SIZE - y(bottom[i]))}Z"
            for i in range(len(middles))
            if top[i] > bottom[i]
        )
        shapes.append(f'<path class="area c{series.colour}" d="{d}"/>')
    return shapes


def _layers(chart: Chart) -> list[tuple[Series, list[float], list[float]]]:
    """Each series with the bottom and top of its layer; a gap is a layer of height 0."""
    level = [0.0] * len(chart.x)
    layers: list[tuple[Series, list[float], list[float]]] = []
    for series in chart.series:
        top = [base + (v if math.isfinite(v) else 0.0) for base, v in zip(level, series.values, strict=True)]
        layers.append((series, level, top))
        level = top
    return layers


def _band(steps: Sequence[float], series: Series, x: Scale, y: Scale) -> str:
    assert series.low is not None
    assert series.high is not None
    upper = [p for p in _points(steps, series.high, x, y) if not math.isnan(p[1])]
    lower = [p for p in _points(steps, series.low, x, y) if not math.isnan(p[1])][::-1]
    return f'<path class="band c{series.colour}" d="{_path([*upper, *lower])}Z"/>' if upper else ""


def _error_bars(steps: Sequence[float], series: Series, x: Scale, y: Scale) -> str:
    assert series.low is not None
    assert series.high is not None
    bars = "".join(
        f"M{_c(x(step))} {_c(SIZE - y(low))}V{_c(SIZE - y(high))}"
        for step, low, high in zip(steps, series.low, series.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    )
    return f'<path class="error c{series.colour}" d="{bars}"/>'


def _points(steps: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Places on the canvas; nan where there is no value, or none above 0 on a log scale."""
    return [
        (x(step), SIZE - y(value) if math.isfinite(value) and not (y.log and value <= 0) else math.nan)
        for step, value in zip(steps, values, strict=True)
    ]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A line through the points. Values are often logged only every few steps, so it bridges the gaps."""
    known = [(px, py) for px, py in points if not math.isnan(py)]
    return "".join(f"{'L' if i else 'M'}{_c(px)} {_c(py)}" for i, (px, py) in enumerate(known))


def _labels(x: Scale, y: Scale) -> str:
    ys = "".join(
        f'<span class="y" style="top:{_c(100 - y(t) / SIZE * 100)}%">{format_number(t)}</span>' for t in y.ticks
    )
    xs = "".join(f'<span class="x" style="left:{_c(x(t) / SIZE * 100)}%">{format_number(t)}</span>' for t in x.ticks)
    return ys + xs


def _limit(chart: Chart, y: Scale) -> str:
    return "" if chart.limit is None else f'<path class="limit" d="M0 {_c(SIZE - y(chart.limit[0]))}H{SIZE:.0f}"/>'


def _limit_label(chart: Chart, y: Scale) -> str:
    if chart.limit is None:
        return ""
    top = 100 - y(chart.limit[0]) / SIZE * 100
    return f'<span class="limit-name" style="top:{_c(top)}%">{safe(chart.limit[1])}</span>'


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2 and not any(s.low is not None for s in chart.series):
        return ""
    items = "".join(f'<li class="c{series.colour}">{safe(series.name)}</li>' for series in chart.series)
    return f"<ul>{items}</ul>"


def _data(chart: Chart, x: Scale) -> str:
    """What the pointer shows, as one attribute: places in percent, steps, and the values as text."""
    data = {
        "what": f"{chart.x_name} ",
        "left": [round(x(step) / SIZE * 100, 2) for step in chart.x],
        "step": [f"{step:.6g}" for step in chart.x],
        "series": [
            {"name": visible(s.name), "colour": s.colour, "values": [format_number(v) + chart.unit for v in s.values]}
            for s in chart.series
        ],
    }
    return f'data-chart="{safe(json.dumps(data, ensure_ascii=False, separators=(",", ":")))}"'


def _c(value: float) -> str:
    """A coordinate with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")
