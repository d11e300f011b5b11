"""The page as a browser shows it: what the script draws from the data."""

from __future__ import annotations

import json
import math
import shutil
import subprocess

import pytest
from long_run import play
from miles_core import report
from miles_core.monitor import JsonlMonitor
from miles_core.report.page import format_number
from miles_core.text import visible
from test_report import HOSTILE, Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


class Drawn(Page):
    """The page after its script ran, with the text of each element that has a class."""

    def __init__(self, html: str) -> None:
        self.by_class: dict[str, list[str]] = {}
        self._open: list[str] = []
        super().__init__(html)

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        if tag in ("span", "i", "b", "p", "strong"):
            self._open.append(dict(attrs).get("class") or tag)
            self.by_class.setdefault(self._open[-1], []).append("")

    def handle_endtag(self, tag):
        if tag in ("span", "i", "b", "p", "strong"):
            self._open.pop()

    def handle_data(self, data):
        super().handle_data(data)
        if self._open:
            self.by_class[self._open[-1]][-1] += data


def drawn(path, tmp_path) -> Drawn:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return Drawn(done.stdout)


def test_every_chart_lane_and_token_is_drawn_from_the_data(make_run, tmp_path):
    run = make_run(texts=[(HOSTILE, "b"), (HOSTILE,), (HOSTILE, "<|im_end|>"), ("c",), (HOSTILE,)])
    odd = {"tiny": 3.14e-6, "small": 2e-4, "part": 0.532, "some": 41.23, "many": 12345.0, "more": 3.4e6, "huge": 5e12}
    monitor = JsonlMonitor(run)
    for step in (61, 62):
        monitor.log(step, {f"env/{name}": value * (step - 60) for name, value in odd.items()} | {"env/none": math.nan})
    page = drawn(report.write(run), tmp_path)
    charts = [chart for name in ("main", "more") for chart in page.data["charts"][name]]
    figures = [attrs["class"] for tag, attrs in page.tags if tag == "figure"]
    assert len(figures) == len(charts) + 1, "and the timeline"
    assert page.by_class["nothing"] == ["not measured"]
    measured = [chart for chart in charts if "y_axis" in chart]
    for axis, name in (("y_axis", "y"), ("x_axis", "x")):
        ticks = [format_number(tick) for chart in measured for tick in chart[axis][2]]
        assert page.by_class[name] == ticks, "the script writes numbers as Python does"
    paths = [attrs["class"].split()[0] for tag, attrs in page.tags if tag == "path"]
    lines = [chart for chart in measured if "layout" not in chart]
    assert paths.count("line") == sum(len(chart["series"]) for chart in lines)
    assert paths.count("area") == sum(len(chart["series"]) for chart in measured if "layout" in chart)
    assert (paths.count("band"), paths.count("limit"), paths.count("grid")) == (1, 1, len(measured))
    places = [number for tag, attrs in page.tags if tag == "path" for number in _numbers(attrs["d"])]
    assert all(-0.05 <= place <= 1000.05 for place in places)
    tokens = [item for strip in page.data["strips"] for block in strip for item in block["items"]]
    shown = [text for name, texts in page.by_class.items() if name.split()[0] == "t" for text in texts]
    assert visible(HOSTILE) in shown
    assert shown.count(visible(HOSTILE)) == sum(
        visible(HOSTILE) in token for token in tokens if isinstance(token, list)
    )
    assert "v1" in page.by_class["v"]
    assert not {"img", "iframe"} & {tag for tag, _ in page.tags}


def test_a_comparison_and_a_timeline_are_drawn(tmp_path):
    runs = [play(tmp_path / "a"), play(tmp_path / "b", steps=22)]
    path, _ = report.write_comparison(runs)
    page = drawn(path, tmp_path)
    charts = [chart for charts in page.data["charts"].values() for chart in charts]
    assert [tag for tag, _ in page.tags].count("figure") == len(charts)
    page = drawn(report.write(runs[0]), tmp_path)
    names = [lane["name"] for lane in page.data["timeline"]["lanes"]]
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert [label for label in labels if label in names] == names
    assert [attrs["class"] for _, attrs in page.tags if (attrs.get("class") or "").startswith("mark ")] == [
        "mark back"
    ] * 2


def _numbers(d: str) -> list[float]:
    """The coordinates of a path; those relative to a point left out."""
    words = "".join(c if c in "0123456789.-" else " " for c in d.replace("h0", "").replace("h1v1h-1", "")).split()
    return [float(word) for word in words]


def test_the_data_survives_the_browser(make_run, tmp_path):
    run = make_run(steps=3, texts=[("</script>", "b"), ("<!--<script>",), ("e", "<|im_end|>"), ("f",), ("g",)])
    written = Page(report.write(run).read_text(encoding="utf-8")).data
    assert json.loads(drawn(run / "report.html", tmp_path).scripts[0]) == written
