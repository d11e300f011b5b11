"""The parts of the page that the ledger fills."""

from __future__ import annotations

import re
import time

import pytest
from long_run import LongRun, finish_run, play
from miles_core import report
from miles_core.report import run_data
from miles_core.report.history import MOST_EVENTS, read_evaluations
from miles_core.report.run_data import read_ledger, read_run
from miles_core.report.write import score_charts
from miles_rollout.fates import Fate
from test_report import HOSTILE, page_of

SECTIONS = ("Evaluation", "Fates", "Wasted tokens", "Where the time went", "Timeline", "What happened")


def test_every_section_of_a_run_that_had_everything(tmp_path):
    play(tmp_path / "run")
    page = page_of(tmp_path / "run")
    for title in (*SECTIONS, "Discarded rollouts"):
        assert title in page.words, title
    assert "Weight update" in page.titles("main")
    assert page.titles("scores") == ["Held-out score"]
    assert "zero_spread" in page.words
    assert "ConnectionError: sandbox gone" in page.words
    assert "TimeoutError: 600 s were not enough" in page.words
    assert "the trainer is back at step" in page.words
    assert "healthy → dead: exit code -9" in page.words
    assert [lane["name"] for lane in page.data["timeline"]["lanes"]] == [
        *("worker-0", "worker-1", "engines", "trainer", "weight update", "evaluation", "checkpoints"),
        "no engine served",
    ]
    assert page.data["timeline"]["marks"][0]["text"] == "start"
    assert [mark["is_rewind"] for mark in page.data["timeline"]["marks"]] == [False, True, True]


def test_each_fate_begins_where_the_one_before_it_ended_and_its_reasons_share_its_place(tmp_path):
    play(tmp_path / "run")
    html = report.write(tmp_path / "run").read_text(encoding="utf-8")
    table = html.split('<table class="fates">')[1].split("</table>")[0]
    rows = re.findall(r'<tr class="(\w*)"><td>([^<]*)</td>.*?left:([\d.]+)%;width:([\d.]+)%', table, flags=re.DOTALL)
    assert rows[0] == ("", "issued", "0.000", "100.000")
    fate = reason = 0.0
    for kind, name, left, width in rows[1:]:
        assert float(left) == pytest.approx(reason if kind else fate, abs=0.01), name
        reason = reason + float(width) if kind else fate
        fate += 0 if kind else float(width)
    assert fate == pytest.approx(100, abs=0.1)
    assert [name for kind, name, *_ in rows if kind] == ["zero_spread", "too_few_rewards", "run ended"]


def test_a_run_that_goes_on_is_read_while_it_writes(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    running, waiting = run.issue(), run.issue()
    run.finish(waiting)
    page = page_of(tmp_path)
    assert "open: running 1 group" in page.words
    assert "open: in the buffer 1 group" in page.words
    assert "Discarded rollouts" not in page.words
    assert running


def test_all_sections_tell_of_one_moment_of_a_run_that_goes_on(tmp_path, monkeypatch):
    run = LongRun(tmp_path)
    run.start()
    run.issue()

    def meanwhile(db):
        run.issue(5)
        run.ledger.event("engine", "http://e", "healthy → dead")
        return read_evaluations(db)

    monkeypatch.setattr(run_data, "read_evaluations", meanwhile)
    read = read_ledger(tmp_path, [])
    assert read is not None
    assert (read.fates.issued, [kind for kind, *_ in read.events["newest"]]) == (1, ["start"])
    monkeypatch.undo()
    again = read_ledger(tmp_path, [])
    assert again is not None
    assert (again.fates.issued, len(again.events["newest"])) == (6, 2)


def test_a_run_without_a_ledger_has_the_timeline_of_its_metrics_alone(make_run):
    page = page_of(make_run())
    assert "Timeline" in page.words
    assert "weight update" in [lane["name"] for lane in page.data["timeline"]["lanes"]]
    for title in ("Fates What became", "Wasted tokens", "Where the time went", "What happened"):
        assert title not in page.words


def test_a_ledger_that_nothing_was_written_to_has_no_section(tmp_path):
    LongRun(tmp_path).write()
    page = page_of(tmp_path)
    for title in SECTIONS:
        assert title not in page.words


def test_what_the_ledger_says_stays_text(tmp_path):
    play(tmp_path / "run", hostile=HOSTILE)
    page = page_of(tmp_path / "run")
    assert "<script>alert(1)</script>" in page.words
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json", None]
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "\u202e" not in page.words + page.scripts[0]


def test_a_discarded_group_whose_record_is_gone_is_told(tmp_path):
    play(tmp_path / "run")
    for file in (tmp_path / "run" / "trajectories").glob("*.spool"):
        file.unlink()
    page = page_of(tmp_path / "run")
    assert "is gone, and with it the group" in page.words
    assert "too_few_rewards" in page.words


def test_reasons_beyond_the_most_frequent_are_added_up(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = run.issue(30)
    run.finish(names, buffered=False)
    for i, name in enumerate(names):
        run.end([name], Fate.FILTERED, f"reason {min(i, 20)}")
    page = page_of(run.write())
    assert "15 other reasons" in page.words
    assert page.words.count("reason 20") >= 2
    assert len([tag for tag, attrs in page.tags if tag == "details" and "open" not in attrs]) <= 2 * 12 + 8


def test_only_the_newest_events_are_listed_and_the_rest_counted(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    for i in range(100):
        run.clock.go(1)
        run.ledger.event("engine", "http://e", f"event {i}")
    for _ in range(500):
        run.ledger.event("alarm", "queue_empty", "the trainer starves")
    page = page_of(run.write())
    assert "start 1, alarm 500, engine 100." in page.words
    assert f"The newest {MOST_EVENTS} of 102 different events" in page.words
    assert "event 99" in page.words
    assert "event 10 " not in page.words


def test_a_score_that_is_evaluated_again_counts_once_and_one_that_a_rewind_took_back_not_at_all(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = [run.issue() for _ in range(3)]
    for step, group in enumerate(names, start=1):
        run.finish(group)
        run.step(step, group)
        run.checkpoint(step) if step == 1 else None
        run.evaluate(step, step / 10, seconds=1, lag=step)
    run.start(1)
    run.evaluate(1, 0.7, seconds=1)
    run.write()
    (drawn,) = score_charts(read_run(tmp_path).ledger.evaluations)
    (line,) = drawn.series
    assert (line.x, line.values) == ([1], [0.7])
    assert line.low == pytest.approx([0.6])
    words = page_of(tmp_path).words
    assert "of weights that a rewind took back" in words
    assert "scores came up to 3 steps late" in words


def test_a_dataset_has_its_own_interval(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    metrics = {"eval/maths/score_low": 0.25, "eval/maths/score_high": 0.75}
    run.ledger.evaluated("maths", version=0, logged_version=0, score=0.5, metrics=metrics)
    run.ledger.evaluated("code", version=0, logged_version=0, score=0.5, metrics={})
    run.write()
    found = read_run(tmp_path).ledger.evaluations
    assert [(one["dataset"], one["interval"]) for one in found] == [("maths", (0.25, 0.75)), ("code", None)]
    assert page_of(tmp_path).titles("scores") == ["Held-out score: maths", "Held-out score: code"]


def test_many_workers_share_the_last_lane(tmp_path):
    run = LongRun(tmp_path, workers=40)
    run.start()
    names = run.issue(40)
    run.clock.go(5)
    run.finish(names)
    lanes = [lane["name"] for lane in read_run(run.write()).timeline()["lanes"]]
    assert lanes[:3] == ["worker-0", "worker-1", "worker-2"]
    assert lanes[-1] == "25 more workers"


def test_heat_of_a_group_that_was_issued_again_is_when_its_episodes_ran(tmp_path):
    run = LongRun(tmp_path, workers=1)
    run.start()
    names = run.issue(2)
    run.clock.go(50)
    run.issue()
    run.clock.go(50)
    run.start(0)
    run.clock.go(50)
    run.finish(names, seconds=40)
    run.clock.go(50)
    run.issue()
    (lane,) = read_run(run.write()).timeline()["lanes"]
    heat, bins = lane["heat"], len(lane["heat"])
    assert not any(heat[: bins * 11 // 20 - 1]), "what ran before was lost, and the new process had to start"
    assert min(heat[bins * 11 // 20 + 2 : bins * 3 // 4 - 2]) == pytest.approx(1.0)
    assert not any(heat[bins * 3 // 4 + 2 :])


def test_a_page_of_a_long_run_is_small_and_made_in_seconds(tmp_path):
    play(tmp_path / "run", steps=100)
    finish_run(tmp_path / "run")
    began = time.perf_counter()
    page = report.write(tmp_path / "run").read_text(encoding="utf-8")
    assert time.perf_counter() - began < 10
    assert len(page) < 600_000
    assert not re.search(r"\bnan\b|Infinity", page)
