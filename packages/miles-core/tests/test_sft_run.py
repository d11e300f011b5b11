"""Supervised training that stopped ends with the very weights of one that did not, without Ray around its parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_core.actors.trainer_rank import TrainerRank
from miles_core.config import CheckpointConfig, Config, ModelConfig, RunConfig, SftConfig
from miles_core.durable import rundir
from miles_core.monitor import MonitorConfig, build_monitor, read_metrics
from miles_core.run import sft
from miles_core.run.batching import RankWork, plan_ranks
from miles_core.run.demonstrations import SupervisedSource
from miles_core.run.loop import Trained
from miles_core.run.resume import ResumeError
from miles_core.run.sft import SftRun
from miles_rollout.dispatch import GroupRequest
from miles_train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from miles_train.errors import CheckpointError
from miles_train.models import build_tiny
from safetensors.numpy import load_file


class Stopped(Exception):
    """The process ends here."""


class LocalTrainers:
    """One trainer rank in this process."""

    def __init__(self, config: TrainConfig, model: Path, *, stop_at: int | None) -> None:
        self._config, self._model, self._stop_at = config, model, stop_at
        self._rank = TrainerRank(rank=0)

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        return self._model

    async def setup(self, config: TrainConfig, model: Path) -> object:
        self._config = config
        return self._rank.setup(config=config, model=model, init_method=None)

    def plan(self, groups: Sequence[Any], advantages: Any) -> list[RankWork]:
        return plan_ranks(groups, advantages=advantages, token_budget=self._config.token_budget, ranks=1, minibatches=1)

    async def train(self, work: Sequence[RankWork]) -> Trained:
        trained = await asyncio.to_thread(self._rank.train, work[0], list(work[0].handles))
        if trained.version == self._stop_at:
            raise Stopped
        return trained

    async def begin_save(self, path: Path) -> None:
        self._rank.begin_save(path)

    async def finish_save(self) -> None:
        await asyncio.to_thread(self._rank.finish_save)

    async def load(self, path: Path) -> None:
        self._rank.load(path)

    async def export(self, path: Path) -> None:
        self._rank.export(path)

    async def stop(self) -> None:
        self._rank.close()


class LocalSource:
    """The demonstrations as their actor answers."""

    def __init__(self) -> None:
        self._source: SupervisedSource | None = None
        self.open, self.run_group = _Remote(self._open), _Remote(self._run_group)

    async def _open(self, config: SftConfig, *, skip: int, **known: Any) -> dict[str, Any]:
        self._source = SupervisedSource(config, store=lambda group: group, **known)
        self._source.skip(skip)
        return self._source.fingerprint()

    async def _run_group(self, request: GroupRequest) -> Any:
        assert self._source is not None
        return self._source.group(request)


class _Remote:
    def __init__(self, call: Any) -> None:
        self.remote = call


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
        parts: Any = type(
            "Parts", (), {"trainers": lambda _: LocalTrainers(config.train, self._model, stop_at=stop_at)}
        )
        monitor = build_monitor(MonitorConfig(console="off"), run_dir=self.path, total_steps=config.sft.steps)
        run = SftRun(config, run_dir=run_dir, monitor=monitor, parts=parts(), accept_changes=accept_changes)
        asyncio.run(run.run())

    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.path / "checkpoints" / "final" / "model.safetensors")

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob("step-*"))


@pytest.fixture
def runs(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sft, "spawn", lambda actor: LocalSource)
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
