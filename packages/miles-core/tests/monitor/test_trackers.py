"""The trackers, each with its own real package and no network."""

from __future__ import annotations

import importlib
import sys

import pytest
from miles_core.monitor import MonitorConfig, RunSummary, TrackioConfig, WandbConfig, build_monitor, read_metrics
from miles_tito.errors import MissingDependency

SUMMARY = RunSummary(status="finished", steps=2, seconds=1.0)


def run_two_steps(config: MonitorConfig, run_dir) -> None:
    monitor = build_monitor(config, run_dir=run_dir, total_steps=2, run_config={"run": {"seed": 1}})
    monitor.log(1, {"reward/mean": 0.25})
    monitor.log(2, {"reward/mean": 0.5})
    monitor.event("train", 1.0, 2.0, "trainer")
    monitor.finish(SUMMARY)


def test_without_trackers_a_run_leaves_metrics_trace_and_summary(tmp_path, capsys):
    run_two_steps(MonitorConfig(console="off"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json", "trace.json"]
    assert [row["reward/mean"] for row in read_metrics(tmp_path)] == [0.25, 0.5]
    assert capsys.readouterr().out == ""


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    run_two_steps(MonitorConfig(console="off", trace=False, tensorboard=True), tmp_path)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events_file,) = (tmp_path / "tensorboard").iterdir()
    rows = [
        (event.step, value.tag, round(value.tensor.float_val[0], 6))
        for event in EventFileLoader(str(events_file)).Load()
        for value in event.summary.value
    ]
    assert rows == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5)]


def test_tensorboard_drops_steps_that_are_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = MonitorConfig(console="off", trace=False, tensorboard=True)
    for start in (0, 2):
        monitor = build_monitor(config, run_dir=tmp_path, total_steps=4)
        monitor.rewind(start)
        for step in range(start + 1, 5):
            monitor.log(step, {"reward/mean": step + start / 10})
        monitor.finish(SUMMARY)
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    scalars = [(event.step, round(event.value, 3)) for event in seen.Scalars("reward/mean")]
    assert scalars == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2)]


def test_a_resumed_run_is_the_same_run_to_the_trackers(tmp_path, monkeypatch):
    """With stand-ins for both packages, whose own resumption is theirs to test."""
    started: list[tuple] = []

    class Run:
        def define_metric(self, name, step_metric=None):
            pass

    def wandb_init(**options):
        started.append(("wandb", options["id"], options["resume"]))
        return Run()

    def trackio_init(**options):
        started.append(("trackio", options["name"], options["resume"]))
        return Run()

    wandb, trackio = pytest.importorskip("wandb"), pytest.importorskip("trackio")
    monkeypatch.setattr(wandb, "init", wandb_init)
    monkeypatch.setattr(trackio, "init", trackio_init)
    config = MonitorConfig(
        console="off", trace=False, wandb=WandbConfig(enabled=True), trackio=TrackioConfig(enabled=True)
    )
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        build_monitor(config, run_dir=tmp_path / folder, total_steps=4).rewind(1)
    (_, one, allow), new, (_, again, _), resumed, (_, two, _), other = started
    assert allow == "allow"
    assert one == again != two
    assert new == ("trackio", "one", "never"), "another run may have the same name"
    assert resumed == ("trackio", "one", "allow")
    assert other == ("trackio", "two", "never")


@pytest.mark.slow
def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = MonitorConfig(console="off", wandb=WandbConfig(enabled=True, mode="offline"))
    run_two_steps(config, tmp_path)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    ("module", "package"), [("tensorboard", "tensorboard.compat"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_tracker_that_is_not_installed_says_what_installs_it(monkeypatch, module, package):
    for name in [n for n in sys.modules if n.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"miles_core.monitor.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package.split(".")[0], None)
    with pytest.raises(MissingDependency, match=rf"pip install 'miles-core\[{module}\]'"):
        importlib.import_module(f"miles_core.monitor.{module}")


@pytest.mark.slow
def test_trackio_keeps_the_run_in_its_own_database(tmp_path):
    """In its own process: trackio fixes its folder when it is imported."""
    pytest.importorskip("trackio")
    import os
    import subprocess

    code = (
        "import pathlib, sys\n"
        "from miles_core.monitor import *\n"
        "config = MonitorConfig(console='off', trackio=TrackioConfig(enabled=True, project='p'))\n"
        "run_dir = pathlib.Path(sys.argv[1])\n"
        "monitor = build_monitor(config, run_dir=run_dir, total_steps=2)\n"
        "monitor.log(1, {'reward/mean': 0.25})\n"
        "monitor.log(2, {'reward/mean': 0.5})\n"
        "monitor.finish(RunSummary(status='finished', steps=2, seconds=1.0))\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print([row['reward/mean'] for row in SQLiteStorage.get_logs('p', run_dir.name)])\n"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "[0.25, 0.5]" in result.stdout
    assert TrackioConfig().enabled is False
