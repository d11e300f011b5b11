"""Supervised training that stopped ends with the very weights of one that did not, without Ray around its parts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_ray import FakeActor, FakeRay
from miles_core.actors.trainer_rank import TrainerRank
from miles_core.cluster import remote
from miles_core.config import CheckpointConfig, Config, ModelConfig, RunConfig, SftConfig
from miles_core.durable import rundir
from miles_core.monitor import MonitorConfig, build_monitor, read_metrics
from miles_core.run.changes import ResumeError
from miles_core.run.sft import SftRun
from miles_train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from miles_train.errors import CheckpointError
from miles_train.models import build_tiny
from safetensors.numpy import load_file


class Stopped(Exception):
    """The process ends here."""


class Local(FakeRay):
    """The trainer rank and the demonstrations in this process; it ends behind the step `stop_at`."""

    def __init__(self, stop_at: int | None) -> None:
        super().__init__()
        self._stop_at = stop_at

    async def run(self, actor: FakeActor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "finish_save":
            return await asyncio.to_thread(actor.held.finish_save)
        result = await super().run(actor, name, args, kwargs)
        if name == "train" and result.version == self._stop_at:
            raise Stopped
        return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny")


CONFIG = Config(
    run=RunConfig(seed=3),
    sft=SftConfig(
        steps=7,
        batch_size=4,
        data="miles_envs.tasks.arithmetic:sft_conversations",
        data_args={"seed": 0, "n": 10},
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(kind="cosine", total_steps=7),
    ),
    train=TrainConfig(device="cpu", threads=1, token_budget=512),
    checkpoint=CheckpointConfig(every=2),
)


class Runs:
    """Starts `miles sft` in a directory, again and again."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path = path
        self._model = model

    def start(self, config: Config = CONFIG, *, stop_at: int | None = None, accept_changes: bool = False) -> None:
        if not self.path.exists():
            made = rundir.create(self.path.parent, self.path.name, config={}, kind="sft")
            assert made.lock is not None
            made.lock.release()
        run_dir = rundir.RunDir(path=self.path)
        remote.ray = Local(stop_at)  # pyright: ignore[reportAttributeAccessIssue]  (the fixture puts it back)
        config = replace(config, model=ModelConfig(path=str(self._model)))
        monitor = build_monitor(MonitorConfig(console="off"), run_dir=self.path, total_steps=config.sft.steps)
        run = SftRun(config, run_dir=run_dir, monitor=monitor, accept_changes=accept_changes)
        asyncio.run(run.run())

    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.path / "checkpoints" / "final" / "model.safetensors")

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob("step-*"))


@pytest.fixture
def runs(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "ray", None)
    return lambda name: Runs(tmp_path / name, model)


def test_a_run_that_stopped_twice_ends_with_the_weights_of_an_unbroken_one(runs) -> None:
    """Faults D06, D07, D13: step, schedule, moments and the place in the data go on, in the middle of an epoch."""
    whole, broken = runs("whole"), runs("broken")
    whole.start()
    for stop_at in (4, 6):
        with pytest.raises(ExceptionGroup) as caught:
            broken.start(stop_at=stop_at)
        assert caught.group_contains(Stopped)
    broken.start()
    assert broken.checkpoints() == ["step-000006", "step-000007"]
    assert [row["step"] for row in read_metrics(broken.path)] == [1, 2, 3, 4, 5, 6, 7]
    expected, got = whole.weights(), broken.weights()
    assert all(np.array_equal(expected[name], got[name]) for name in expected)
    for a, b in zip(read_metrics(whole.path), read_metrics(broken.path), strict=True):
        assert {k: v for k, v in a.items() if k.startswith(("loss/", "optimizer/"))} == {
            k: v for k, v in b.items() if k.startswith(("loss/", "optimizer/"))
        }


def test_a_finished_run_goes_on_with_more_steps(runs) -> None:
    run = runs("run")
    run.start(replace(CONFIG, sft=replace(CONFIG.sft, steps=3)))
    assert run.checkpoints() == ["step-000002", "step-000003"]
    run.start()
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3, 4, 5, 6, 7]


def test_other_demonstrations_are_refused_unless_accepted(runs) -> None:
    run = runs("run")
    run.start(replace(CONFIG, sft=replace(CONFIG.sft, steps=2)))
    other = replace(CONFIG, sft=replace(CONFIG.sft, data_args={"seed": 1, "n": 10}))
    with pytest.raises(ResumeError, match="The content of the 10 entries of the data has changed"):
        run.start(other)
    run.start(other, accept_changes=True)
    assert json.loads((run.path / "checkpoints" / "step-000007" / "state.json").read_text())["step"] == 7


def test_a_full_disk_ends_the_run_and_the_next_start_goes_on(runs, monkeypatch) -> None:
    run = runs("run")

    def full(self: TrainerRank) -> None:
        raise CheckpointError("10 bytes are needed and 3 are free")

    with monkeypatch.context() as patch:
        patch.setattr(TrainerRank, "finish_save", full)
        with pytest.raises((ExceptionGroup, CheckpointError)):
            run.start()
    assert run.checkpoints() == []
    run.start()
    assert run.checkpoints() == ["step-000006", "step-000007"]
