from __future__ import annotations

import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from miles_core.monitor import (
    JsonlMonitor,
    MonitoredRun,
    MultiMonitor,
    RunSummary,
    StepError,
    read_metrics,
    read_summary,
)
from miles_core.monitor.console import ConsoleMonitor, Eta, plain_row
from miles_core.monitor.names import METRICS, describe, markdown_table
from miles_core.monitor.trace import TraceMonitor

SUMMARY = RunSummary(
    status="finished",
    steps=40,
    seconds=95.2,
    eval_before=0.31,
    eval_after=0.905,
    samples_per_s=12.345,
    engine_utilisation=0.71,
    trainer_utilisation=0.42,
    fates={"issued": 20, "trained": 16, "filtered": 2, "stale": 1, "failed": 0, "aborted": 1, "in_flight": 0},
    report="runs/x/report.html",
)


def run_in(path: Path = Path("run"), *, total_steps: int = 9) -> MonitoredRun:
    return MonitoredRun(path=path, total_steps=total_steps, config={})


class Recorder:
    def __init__(self, *, broken: bool = False) -> None:
        self.calls: list[tuple] = []
        self._broken = broken

    def _call(self, *call) -> None:
        if self._broken:
            raise ConnectionError("503 from the tracker")
        self.calls.append(call)

    def log(self, step, metrics) -> None:
        self._call("log", step, dict(metrics))

    def log_late(self, step, metrics) -> None:
        self._call("log_late", step, dict(metrics))

    def rewind(self, step) -> None:
        self._call("rewind", step)

    def event(self, name, start, end, lane) -> None:
        self._call("event", name, start, end, lane)

    def finish(self, summary) -> None:
        self._call("finish", summary)


def test_metrics_that_come_late_belong_to_their_own_step(tmp_path):
    out = io.StringIO()
    jsonl = JsonlMonitor(tmp_path)
    monitor = MultiMonitor([jsonl], [ConsoleMonitor(run_in(total_steps=9), mode="plain", file=out)])
    for step in (1, 2, 3):
        monitor.log(step, {"reward/mean": step / 10})
    monitor.log_late(1, {"eval/score": 0.5, "eval/lag_steps": 2.0})
    monitor.log(4, {"reward/mean": 0.4})
    rows = {row["step"]: row for row in read_metrics(tmp_path)}
    assert (rows[1]["reward/mean"], rows[1]["eval/score"]) == (0.1, 0.5)
    assert "eval/score" not in rows[3]
    assert "step 1/9 | held-out 0.500 | 2 steps later" in out.getvalue()


def test_every_monitor_receives_every_call():
    first, second = Recorder(), Recorder()
    monitor = MultiMonitor([first], [second])
    monitor.log(1, {"reward/mean": 0.5})
    monitor.event("train", 1.0, 2.0, "trainer")
    monitor.finish(SUMMARY)
    assert first.calls == second.calls
    assert [call[0] for call in first.calls] == ["log", "event", "finish"]


def test_a_failing_tracker_is_dropped_once_with_a_warning_and_the_run_goes_on(caplog):
    record, tracker = Recorder(), Recorder(broken=True)
    monitor = MultiMonitor([record], [tracker])
    monitor.log(1, {})
    monitor.log(2, {})
    assert [call[1] for call in record.calls] == [1, 2]
    assert len(caplog.records) == 1
    assert "503 from the tracker" in caplog.text


def test_a_failing_record_ends_the_run():
    with pytest.raises(ConnectionError):
        MultiMonitor([Recorder(broken=True)]).log(1, {})


def test_a_step_logged_out_of_order_is_refused_with_both_numbers():
    monitor = MultiMonitor([Recorder()])
    monitor.log(5, {})
    monitor.log(5, {})
    with pytest.raises(StepError, match="Step 4 was logged after step 5"):
        monitor.log(4, {})


def test_rows_come_back_with_their_numbers_those_of_one_step_merged(tmp_path):
    monitor = JsonlMonitor(tmp_path)
    monitor.log(0, {"eval/score": 0.25})
    monitor.log(1, {"reward/mean": np.float32(0.5), "reward/std": math.nan, "loss/total": -math.inf})
    monitor.log(1, {"eval/score": 0.5})
    first, second = read_metrics(tmp_path)
    assert first["eval/score"] == 0.25
    assert second["step"] == 1
    assert (second["reward/mean"], second["eval/score"], second["loss/total"]) == (0.5, 0.5, -math.inf)
    assert math.isnan(second["reward/std"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rows_survive_a_kill_in_the_middle_of_a_write_and_the_next_process_appends(tmp_path):
    code = (
        "import sys, os, pathlib\n"
        "from miles_core.monitor.jsonl import JsonlMonitor\n"
        "monitor = JsonlMonitor(pathlib.Path(sys.argv[1]))\n"
        "monitor.log(1, {'reward/mean': 1.0})\n"
        "monitor.log(2, {'reward/mean': 2.0})\n"
        'os.write(monitor._fd, b\'{"step": 3, "rew\')\n'
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]

    JsonlMonitor(tmp_path).log(3, {"reward/mean": 3.0})
    assert [row["reward/mean"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 3.0]


def test_rows_are_forced_to_the_device_no_later_than_the_interval(tmp_path, monkeypatch):
    now = 0.0
    monitor = JsonlMonitor(tmp_path, fsync_interval_s=5.0, clock=lambda: now)
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    for now in [1.0, 4.9, 5.0, 6.0, 10.1]:
        monitor.log(1, {})
        calls.append(f"row at {now}")
    assert calls == ["row at 1.0", "row at 4.9", "fsync", "row at 5.0", "row at 6.0", "fsync", "row at 10.1"]


def test_after_going_back_there_is_one_row_a_step_and_the_others_are_kept_aside(tmp_path):
    def steps(name: str) -> list[float]:
        return [json.loads(line)["loss/total"] for line in (tmp_path / name).read_text().splitlines()]

    first = MultiMonitor([JsonlMonitor(tmp_path)])
    for step in (0, 1, 2, 3, 4):
        first.log(step, {"loss/total": step})
    first.log_late(2, {"loss/total": 2.5})
    first.rewind(2)  # in the same process, when only the trainer died
    first.log(3, {"loss/total": 3.1})
    assert steps("metrics.jsonl") == [0, 1, 2, 2.5, 3.1]
    assert steps("metrics.discarded.jsonl") == [3, 4]

    second = MultiMonitor([JsonlMonitor(tmp_path)])  # and in the next one, when all died
    second.rewind(2)
    second.log(3, {"loss/total": 3.2})
    assert steps("metrics.jsonl") == [0, 1, 2, 2.5, 3.2]
    assert steps("metrics.discarded.jsonl") == [3, 4, 3.1]
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_kill_while_rows_are_moved_loses_none_and_doubles_none(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        JsonlMonitor(tmp_path).log(step, {})
    content = (tmp_path / "metrics.jsonl").read_bytes()
    monitor = JsonlMonitor(tmp_path)

    class Killed(BaseException):
        pass

    def killed(self, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            monitor.rewind(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content
    with (tmp_path / "metrics.discarded.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "ti')  # as the next process may find it
    JsonlMonitor(tmp_path).rewind(1)
    rows = (tmp_path / "metrics.jsonl").read_bytes() + (tmp_path / "metrics.discarded.jsonl").read_bytes()
    assert rows == content


def test_a_line_that_is_no_row_is_passed_over_and_stays(tmp_path):
    monitor = JsonlMonitor(tmp_path)
    monitor.log(1, {"loss/total": 1})
    for line in ("{not json", "[3]", "7", '{"loss/total": 2}', '{"step": "two"}'):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    monitor.log(2, {"loss/total": 2})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    monitor.rewind(1)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_going_back_to_where_the_run_is_changes_nothing(tmp_path):
    monitor = JsonlMonitor(tmp_path)
    monitor.rewind(0)
    monitor.log(1, {})
    monitor.rewind(1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len(read_metrics(tmp_path)) == 1


def test_a_run_that_goes_on_has_no_summary_until_it_ends_again(tmp_path):
    JsonlMonitor(tmp_path).finish(SUMMARY)
    monitor = JsonlMonitor(tmp_path)
    assert read_summary(tmp_path) is None
    monitor.finish(SUMMARY)
    assert read_summary(tmp_path) == SUMMARY


def test_the_summary_is_absent_until_the_run_finishes_and_comes_back_equal(tmp_path):
    monitor = JsonlMonitor(tmp_path)
    assert read_summary(tmp_path) is None
    monitor.finish(SUMMARY)
    assert read_summary(tmp_path) == SUMMARY


def test_the_summary_balances_fates_and_counts_the_lost():
    assert SUMMARY.fates_line() == (
        "issued 20 = trained 16 + filtered 2 + stale 1 + failed 0 + aborted 1, in flight 0: 0 lost, 0 twice"
    )
    lossy = RunSummary(status="failed", steps=1, seconds=1.0, fates={"issued": 5, "trained": 3, "twice": 1})
    assert lossy.fates_line().endswith("in flight 0: 2 lost, 1 twice")
    assert "held-out score 0.310 before RL, 0.905 after (+0.595)" in SUMMARY.lines()
    assert "12.35 samples/s, engine utilisation 71%, trainer utilisation 42%" in SUMMARY.lines()


def trace_events(path, *, finished: bool):
    text = path.read_text()
    return json.loads(text if finished else text.rstrip(",\n") + "]")


@pytest.mark.parametrize("finished", [True, False])
def test_a_trace_opens_whether_or_not_the_run_finished(tmp_path, finished):
    monitor = TraceMonitor(run_in(tmp_path))
    monitor.event("train", 100.0, 101.5, "trainer")
    monitor.log(1, {"reward/mean": 0.5, "eval/score": math.nan})
    if finished:
        monitor.finish(SUMMARY)
    events = trace_events(tmp_path / "trace.json", finished=finished)
    span = next(e for e in events if e["ph"] == "X")
    assert (span["name"], span["ts"], span["dur"]) == ("train", 100_000_000, 1_500_000)
    assert {"name": "trainer"} in [e.get("args") for e in events if e["ph"] == "M"]
    assert [e["name"] for e in events if e["ph"] == "C"] == ["reward/mean"]


@pytest.mark.parametrize("end", ["finished", "killed", "killed in an event"])
def test_a_run_that_goes_on_adds_to_its_trace(tmp_path, end):
    first = TraceMonitor(run_in(tmp_path))
    first.rewind(0)
    first.event("train", 100.0, 101.0, "trainer")
    first.event("episode", 100.0, 101.0, "generation")
    first.event("episode", 100.5, 101.0, "generation")
    if end == "finished":
        first.finish(SUMMARY)
    elif end == "killed in an event":
        with (tmp_path / "trace.json").open("a") as file:
            file.write(',\n{"pid": 1, "na')
    second = TraceMonitor(run_in(tmp_path))
    second.rewind(3)
    second.event("train", 200.0, 201.0, "trainer")
    second.event("sync", 201.0, 202.0, "sync")
    second.finish(SUMMARY)
    events = trace_events(tmp_path / "trace.json", finished=True)
    names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    assert names == {"trainer": 1, "generation": 2, "generation 2": 3, "sync": 4}
    assert sum(e["ph"] == "M" for e in events) == 4
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 2, 3, 1, 4]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["back at step 3"]


def test_a_trace_without_events_is_an_empty_list(tmp_path):
    TraceMonitor(run_in(tmp_path)).finish(SUMMARY)
    assert trace_events(tmp_path / "trace.json", finished=True) == []


def test_spans_of_one_lane_that_overlap_go_to_different_rows(tmp_path):
    monitor = TraceMonitor(run_in(tmp_path))
    spans = [(0.0, 3.0), (1.0, 4.0), (3.0, 5.0), (3.5, 6.0), (4.0, 7.0)]
    for start, end in spans:
        monitor.event("episode", start, end, "generation")
    monitor.finish(SUMMARY)
    rows: dict[int, list[tuple[int, int]]] = {}
    for event in trace_events(tmp_path / "trace.json", finished=True):
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 3
    for row in rows.values():
        row.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(row))


METRICS_OF_A_STEP = {
    "reward/mean": 0.531,
    "reward/std": 0.31,
    "episode/tokens": 41.2,
    "staleness/mean": 0.5,
    "engine/tokens_per_s": 1240.0,
    "time/step": 2.0,
    "time/train": 0.5,
    "logprob_gap/max": 3.1e-6,
}


def test_the_plain_console_prints_one_line_a_step_with_what_is_known():
    out = io.StringIO()
    times = iter([0.0, 10.0])
    monitor = ConsoleMonitor(run_in(total_steps=10), file=out, clock=lambda: next(times))
    monitor.log(1, METRICS_OF_A_STEP)
    monitor.log(2, METRICS_OF_A_STEP)
    monitor.finish(SUMMARY)
    first, second, *summary = out.getvalue().splitlines()
    assert first == (
        "step 1/10 | reward 0.531 ± 0.31 | tokens 41.2 | stale 0.50 | gap 3.1e-06 | tok/s 1,240 | train 25% | "
        "s/step 2.00"
    )
    assert second.endswith("1 min 20 s left")
    assert summary == SUMMARY.lines()


def test_the_rich_console_draws_a_table_and_leaves_the_rows_behind():
    out = io.StringIO()
    monitor = ConsoleMonitor(run_in(total_steps=2), mode="rich", file=out)
    monitor.log(1, METRICS_OF_A_STEP)
    monitor.log(2, {})
    monitor.finish(SUMMARY)
    text = out.getvalue()
    assert "held-out" in text
    assert "0.531 ± 0.31" in text
    assert "issued 20" in text


def test_the_console_says_where_a_run_goes_on_and_counts_the_time_left_anew():
    out = io.StringIO()
    times = iter([0.0, 10.0, 5000.0, 5001.0])
    monitor = ConsoleMonitor(run_in(total_steps=4), file=out, mode="plain", clock=lambda: next(times))
    monitor.rewind(0)
    monitor.log(1, {})
    monitor.log(2, {})
    monitor.rewind(1)
    monitor.log(2, {})
    monitor.log(3, {})
    assert out.getvalue().splitlines() == [
        "step 1/4",
        "step 2/4 | 20 s left",
        "going on from step 1",
        "step 2/4",
        "step 3/4 | 1.0 s left",
    ]


def test_the_time_left_counts_from_the_first_row_not_from_the_start_up():
    times = iter([100.0, 102.0, 106.0])
    eta = Eta(5, clock=lambda: next(times))
    assert math.isnan(eta.update(1))
    assert eta.update(2) == pytest.approx(2.0 * 3)
    assert eta.update(5) == 0.0


def test_a_row_without_metrics_is_only_the_step():
    assert plain_row(3, 4, {}, math.nan) == "step 3/4"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", METRICS["reward/mean"]),
        ("env/format_ok", METRICS["env/*"]),
        ("env/format_ok_coverage", METRICS["env/*_coverage"]),
        ("loss/kl", METRICS["loss/*"]),
        ("mine/own", None),
    ],
)
def test_the_catalogue_describes_names_and_families(name, expected):
    assert describe(name) == expected


def test_the_catalogue_prints_as_a_table():
    assert "| `staleness/max` |" in markdown_table()


def test_the_readme_has_the_catalogue():
    readme = Path(__file__).parents[2] / "README.md"
    assert markdown_table() in readme.read_text(encoding="utf-8")
