"""A monitor of the user's own: one file and one line of TOML."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from miles_core.config import to_dict, to_toml
from miles_core.config.load import load_config
from miles_core.config.problems import ConfigError
from miles_core.monitor import RunSummary, build_monitor, read_metrics
from miles_tito.errors import MilesError

MODULE = '''
import json
from collections.abc import Mapping

from miles_core.monitor import Monitor, MonitoredRun, RunSummary


class Loud(Monitor):
    """Keeps what is above a bound."""

    def __init__(self, run: MonitoredRun, *, above: float = 0.9) -> None:
        self._run, self._above, self._steps = run, above, []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics["reward/mean"] > self._above:
            self._steps.append(step)

    def finish(self, summary: RunSummary) -> None:
        facts = {"steps": self._steps, "of": self._run.total_steps, "seed": self._run.config["run"]["seed"]}
        (self._run.path / f"loud-{self._above}.json").write_text(json.dumps(facts))


class Broken(Monitor):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("503 from my dashboard")


class NoMonitor:
    def __init__(self, run: MonitoredRun) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the user's module, which the configuration lies beside."""
    (tmp_path / "my_monitors.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_monitors", None)


def configured(folder: Path, line: str):
    file = folder / "my.toml"
    file.write_text(f'[monitor]\nconsole = "off"\ntrace = false\n{line}\n')
    return load_config(["@", str(file)]).config


def run_three_steps(config, run_dir: Path) -> None:
    run_dir.mkdir()
    monitor = build_monitor(config.monitor, run_dir=run_dir, total_steps=3, run_config=to_dict(config))
    for step, reward in enumerate((0.5, 0.85, 0.95), start=1):
        monitor.log(step, {"reward/mean": reward})
        monitor.event("train", 1.0, 2.0, "trainer")
    monitor.log_late(3, {"eval/score": 0.5})
    monitor.finish(RunSummary(status="finished", steps=3, seconds=1.0))


def test_monitors_are_named_in_the_configuration_with_arguments_and_without(mine):
    config = configured(
        mine, 'custom = ["my_monitors:Loud", { name = "my_monitors:Loud", args = { above = 0.8 } }]\n[run]\nseed = 7'
    )
    run_three_steps(config, mine / "run")
    assert (mine / "run" / "loud-0.9.json").read_text() == '{"steps": [3], "of": 3, "seed": 7}'
    assert (mine / "run" / "loud-0.8.json").read_text() == '{"steps": [2, 3], "of": 3, "seed": 7}'


def test_the_configuration_that_is_shown_loads_to_the_same_monitors(mine):
    config = configured(mine, 'custom = ["my_monitors:Loud", { name = "my_monitors:Loud", args = { above = 0.8 } }]')
    (mine / "shown.toml").write_text(to_toml(config))
    assert load_config(["@", str(mine / "shown.toml")]).config == config
    assert load_config([], stored=to_dict(config)).config == config


def test_one_that_raises_is_switched_off_with_a_warning_and_the_run_goes_on(mine, caplog):
    config = configured(mine, 'custom = ["my_monitors:Broken", "my_monitors:Loud"]\n[run]\nseed = 7')
    run_three_steps(config, mine / "run")
    assert len(caplog.records) == 1
    assert "Broken failed and is switched off" in caplog.text
    assert "503 from my dashboard" in caplog.text
    assert (mine / "run" / "loud-0.9.json").exists()
    assert [row["reward/mean"] for row in read_metrics(mine / "run")] == [0.5, 0.85, 0.95]


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ('"my_monitors:Lout"', "has no 'Lout'. Did you mean Loud"),
        ('"my_monitor:Loud"', "no module 'my_monitor'"),
        ('{ name = "my_monitors:Loud", args = { below = 0.8 } }', "below"),
        ('"my_monitors:NoMonitor"', "NoMonitor without log_late, rewind, event, finish"),
    ],
)
def test_what_cannot_be_a_monitor_is_refused_before_anything_starts(mine, custom, message):
    config = configured(mine, f"custom = [{custom}]")
    with pytest.raises(MilesError, match=message):
        build_monitor(config.monitor, run_dir=mine, total_steps=3)
    assert not (mine / "metrics.jsonl").exists()


def test_a_bare_name_is_told_that_built_in_monitors_have_keys_of_their_own(mine):
    with pytest.raises(ConfigError, match="'wandb', which is no import string"):
        configured(mine, 'custom = ["wandb"]')
