"""`miles report A B`: runs side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_run import LongRun, play
from miles_core import cli, report
from miles_core.monitor import JsonlMonitor
from miles_core.report.charts import Chart, thin
from miles_core.report.compare import MOST_POINTS, Line, Value, charts, differing_keys, lines, to_text
from miles_core.report.page import percent
from miles_core.report.run_data import read_run
from test_report import HOSTILE, Page


def make(path: Path, rows: dict[int, dict[str, float]], config: dict | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    monitor = JsonlMonitor(path)
    for step, row in rows.items():
        monitor.log(step, row)
    return path


def rewards(*values: float, **more: float) -> dict[int, dict[str, float]]:
    return {step: {"reward/mean": value, "time/step": 2.0, **more} for step, value in enumerate(values, start=1)}


def page_of(*runs: Path) -> Page:
    path, _ = report.write_comparison(runs)
    return Page(path.read_text(encoding="utf-8"))


def chart_of(title: str, found: list[Chart]) -> Chart:
    return next(chart for chart in found if chart.title == title)


def line_of(name: str, *runs: Path) -> Line:
    return next(line for line in lines([read_run(run) for run in runs]) if line.name == name)


def test_two_runs_with_everything_are_compared_on_one_page(tmp_path):
    play(tmp_path / "a", steps=30)
    play(tmp_path / "b", steps=22)
    page = page_of(tmp_path / "a", tmp_path / "b")
    for text in ("Final numbers", "By step", "By wall time", "effective training time", "wasted tokens", "run.steps"):
        assert text in page.words
    assert "Seconds since the first start of each run." in page.words
    assert (tmp_path / "compare.html").exists()
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json", None]
    for name in ("by-step", "by-time"):
        titles = [chart["title"] for chart in page.data["charts"][name]]
        assert titles == ["Reward", "Seconds a step", "Throughput", "Engines busy"]
        assert [[series["name"] for series in chart["series"]] for chart in page.data["charts"][name]] == [
            ["a", "b"]
        ] * 4
        assert name in [attrs.get("data-charts") for _, attrs in page.tags]


def test_runs_in_any_state_compare(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    run = LongRun(tmp_path / "goes-on")
    run.start()
    run.issue(3)
    killed = make(tmp_path / "killed", rewards(0.1, 0.2))
    with (killed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    page = page_of(killed, tmp_path / "empty", tmp_path / "goes-on")
    assert "no steps yet" in page.words
    only_empty = page_of(tmp_path / "empty", make(tmp_path / "other", {}))
    assert "None of these runs has logged a step." in only_empty.words


def test_what_is_better_and_what_is_noise(tmp_path):
    interval = {"eval/score_low": 0.4, "eval/score_high": 0.6}
    a = make(tmp_path / "a", rewards(0.5, **{"eval/score": 0.5, "engine/tokens_per_s": 100.0, **interval}))
    near = {"eval/score": 0.58, "eval/score_low": 0.48, "eval/score_high": 0.68, "engine/tokens_per_s": 101.0}
    far = {"eval/score": 0.8, "eval/score_low": 0.7, "eval/score_high": 0.9, "engine/tokens_per_s": 50.0}
    b, c = make(tmp_path / "b", rewards(0.5, **near)), make(tmp_path / "c", rewards(0.5, **far))
    score = line_of("held-out score", a, b, c)
    assert [score.text(0), score.difference(2)] == ["0.500 [0.400, 0.600]", "+0.300 (+60 %)"]
    assert [score.verdict(1), score.verdict(2)] == ["", "better"]
    assert [line_of("tokens a second", a, b, c).verdict(i) for i in (1, 2)] == ["", "worse"]
    assert line_of("seconds a step", a, b).difference(1) == "same"


def test_each_dataset_has_its_line_and_its_chart(tmp_path):
    scores = {"eval/score": 0.5, "eval/maths/score": 0.4, "eval/maths/score_low": 0.3, "eval/maths/score_high": 0.5}
    a = make(tmp_path / "a", rewards(0.5, **scores, **{"eval/code/score": 0.6}))
    b = make(tmp_path / "b", rewards(0.5, **{"eval/score": 0.5}))
    assert line_of("held-out score: maths", a, b).text(0) == "0.400 [0.300, 0.500]"
    assert line_of("held-out score: code", a, b).difference(1) == ""
    titles = [chart.title for chart in charts([read_run(a), read_run(b)], ["a", "b"])[0]]
    assert titles[:3] == ["Held-out score", "Held-out score: maths", "Held-out score: code"]


def test_supervised_runs_compare_by_their_loss(tmp_path):
    a, b = (make(tmp_path / name, {1: {"loss/nll": loss}}) for name, loss in (("a", 2.0), ("b", 1.0)))
    line = line_of("nats a token to imitate, last 10 steps", a, b)
    assert (line.difference(1), line.verdict(1)) == ("\N{MINUS SIGN}1.000 (\N{MINUS SIGN}50 %)", "better")


def test_shares_differ_in_points():
    line = Line(name="busy", values=[Value(0.8), Value(0.6)], show=percent, better="up")
    assert (line.text(1), line.difference(1), line.verdict(1)) == ("60 %", "\N{MINUS SIGN}20 points", "worse")


def test_an_unknown_number_has_no_difference(tmp_path):
    a, b = make(tmp_path / "a", rewards(0.5)), make(tmp_path / "b", {1: {"time/step": 2.0}})
    line = line_of("reward, last 10 steps", a, b)
    assert (line.text(1), line.difference(1), line.verdict(1)) == ("\N{EN DASH}", "", "")


def test_only_the_keys_that_differ_are_listed(tmp_path):
    a = make(tmp_path / "a", {}, {"run": {"steps": 3, "seed": 0}, "train": {"lr": 1e-5}, "eval": {}})
    b = make(tmp_path / "b", {}, {"run": {"steps": 4, "seed": 0}, "train": {"lr": 1e-5, "ranks": 2}, "eval": {}})
    assert differing_keys([read_run(a), read_run(b)]) == [("run.steps", ["3", "4"]), ("train.ranks", ["not set", "2"])]


def test_a_run_of_an_older_release_differs_by_its_settings_and_not_by_their_names(tmp_path):
    loss = {"kind": "sft", "normalization": "token"}
    old = make(tmp_path / "a", {}, {"train": {"layout": "auto", "ranks": 2, "loss": loss | {"clip_low": 0.2}}})
    new = make(tmp_path / "b", {}, {"train": {"fsdp": {"layout": "auto"}, "ranks": 1, "loss": loss}})
    assert differing_keys([read_run(old), read_run(new)]) == [("train.ranks", ["2", "1"])]
    odd = make(tmp_path / "c", {}, {"train": "5", "monitor": 3})
    assert ("train", ["not set", '"5"']) in differing_keys([read_run(new), read_run(odd)])


def test_fates_come_from_the_ledger_or_from_the_metrics(tmp_path):
    run = LongRun(tmp_path / "a")
    run.start()
    run.finish(run.issue(3))
    run.write()
    b = make(tmp_path / "b", rewards(0.5, **{"fate/issued": 7.0, "fate/in_flight": 2.0}))
    assert [value.number for value in line_of("groups issued", tmp_path / "a", b).values] == [3, 7]
    assert [value.number for value in line_of("groups open", tmp_path / "a", b).values] == [3, 2]


def test_lines_of_different_lengths_share_the_axis(tmp_path):
    runs = [read_run(make(tmp_path / "a", rewards(0.1, 0.2))), read_run(make(tmp_path / "b", rewards(*[0.5] * 5)))]
    reward = chart_of("Reward", charts(runs, ["a", "b"])[0])
    assert reward.x_range == (1, 5)
    assert [list(series.x) for series in reward.series] == [[1, 2], [1, 2, 3, 4, 5]]
    assert list(reward.series[0].values) == [0.1, 0.2]


def test_time_without_a_process_shows_on_the_axis_of_time(tmp_path):
    run = LongRun(tmp_path / "a")
    run.start()
    names = run.issue(2)
    run.finish(names)
    run.step(1, names[:1])
    run.checkpoint(1, pause=0)
    run.clock.go(5000)
    run.start(1)
    run.step(2, names[1:])
    runs = [read_run(run.write())]
    reward = chart_of("Reward", charts(runs, ["a"])[1])
    assert reward.x_name == "minutes"
    (x,) = [series.x for series in reward.series]
    assert x[-1] - x[0] == pytest.approx(5010 / 60)


def test_long_runs_are_thinned(tmp_path):
    a = make(tmp_path / "a", rewards(*[0.1] * 1000))
    for found in charts([read_run(a)], ["a"]):
        (series,) = chart_of("Reward", found).series
        assert len(series.x) == len(series.values) == MOST_POINTS
        assert np.allclose(series.values, 0.1)
        assert np.all(np.diff(series.x) >= 0)


@given(st.lists(st.one_of(st.floats(0, 100), st.just(math.nan)), min_size=1, max_size=30), st.integers(1, 20))
def test_no_value_leaves_the_range_of_its_run(values, limit):
    rows = [{"step": float(step), "reward/mean": value} for step, value in enumerate(values, start=1)]
    found = [row["reward/mean"] for row in thin(rows, limit) if math.isfinite(row["reward/mean"])]
    known = [value for value in values if math.isfinite(value)]
    assert bool(found) == bool(known)
    assert not found or min(known) - 1e-9 <= min(found) <= max(found) <= max(known) + 1e-9


def test_hostile_names_and_values_stay_text(tmp_path):
    a = make(tmp_path / "<b>x</b>", rewards(0.1), {"model": {"path": HOSTILE}, HOSTILE: 1})
    b = make(tmp_path / "y", rewards(0.2))
    page = page_of(a, b)
    assert "b" not in {tag for tag, _ in page.tags}
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "\u202e" not in page.words + json.dumps(page.data, ensure_ascii=False)


def test_the_command_prints_the_numbers_and_the_path(tmp_path, capsys):
    make(tmp_path / "one" / "run", rewards(0.1), {"run": {"seed": 0}})
    make(tmp_path / "two" / "run", rewards(0.4), {"run": {"seed": 1}})
    words = ["report", str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run"), "--out", str(tmp_path / "c.html")]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "+0.300" in printed
    assert "run.seed" in printed
    assert printed.strip().endswith(str(tmp_path / "c.html"))
    assert str(tmp_path / "two" / "run") in printed, "two runs of one name are told apart by their paths"


def test_one_run_can_go_elsewhere_too(tmp_path, capsys):
    run = make(tmp_path / "run", rewards(0.1))
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert not (run / "report.html").exists()


def test_what_cannot_be_compared_is_refused(tmp_path):
    run = make(tmp_path / "run", rewards(0.1))
    with pytest.raises(report.ReportError, match="is not a directory"):
        report.write_comparison([run, tmp_path / "absent"])
    with pytest.raises(report.ReportError, match="given twice"):
        report.write_comparison([run, tmp_path / "." / "run"])
    many = [make(tmp_path / f"r{i}", {}) for i in range(8)]
    with pytest.raises(report.ReportError, match="8 runs are given; between 2 and 7"):
        report.write_comparison(many)
    with pytest.raises(report.ReportError, match="cannot be written"):
        report.write_comparison(many[:2], out=tmp_path / "absent" / "page.html")


def test_text_of_runs_without_anything(tmp_path):
    runs = [read_run(make(tmp_path / "a", {})), read_run(make(tmp_path / "b", {}))]
    assert to_text(runs) == "None of these runs has logged a step."


def test_a_damaged_ledger_is_named_beside_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that lack it would pass for complete."""
    runs = [make(tmp_path / name, {1: {"reward/mean": 0.5}}) for name in ("a", "b")]
    (runs[1] / "ledger.db").write_bytes(b"no database" * 100)
    assert cli.main(["report", *map(str, runs)]) == cli.DONE
    assert "b: The ledger could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b'{"status": "fin', b"\xff\xac", b"[1]", b'{"of": "another version"}'])
def test_a_damaged_summary_is_named_and_the_rest_is_shown(tmp_path: Path, content: bytes) -> None:
    run = make(tmp_path / "a", {1: {"reward/mean": 0.5}})
    (run / "summary.json").write_bytes(content)
    assert cli.main(["report", str(run)]) == cli.DONE
    assert "The summary could not be read" in (run / "report.html").read_text()
