"""Whole runs with evaluation, over scripts on a virtual clock: points at their steps, rows, ledger, summary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from chaos.clock import VirtualLoop, run
from chaos.faults import Fault
from chaos.processes import scripted
from chaos.record import Record
from chaos.settings import draw_config
from chaos.start import open_run_dir
from chaos.world import World
from miles_core.config import Config, DatasetConfig, EvalConfig
from miles_core.durable.ledger import LEDGER, query
from miles_core.monitor import build_monitor, read_metrics
from miles_core.run import rl
from miles_rollout.dispatch import GroupRequest, RunGroup
from miles_rollout.engines import EngineStartError
from miles_tito.records import Outcome, Prompt
from miles_tito.records.summary import EpisodeSummary, GroupRef, TrajectorySummary

STEPS = 6


def make_config(**fields: Any) -> Config:
    config = draw_config(3)
    rollout = replace(config.rollout, put_policy="mask", take_policy="mask", stragglers="wait", oversampling=1.0)
    return replace(config, run=replace(config.run, steps=STEPS), rollout=rollout, eval=EvalConfig(**fields))


class Broken:
    """Engines that do not come up."""

    async def start(self) -> None:
        raise EngineStartError("no GPU is left for it")

    async def load(self, snapshot: Path, version: int) -> None:
        raise AssertionError("never started")

    def run_group_into(self, folder: Path | None) -> RunGroup:
        raise AssertionError("never started")

    async def stop(self) -> None:
        return None


class Serving:
    """Engines that take a minute for each group, and say which weights they were given."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.stopped = False

    async def start(self) -> None:
        await asyncio.sleep(30)

    async def load(self, snapshot: Path, version: int) -> None:
        assert snapshot.is_dir()
        self.loaded.append(version)

    def run_group_into(self, folder: Path | None) -> RunGroup:
        async def run_group(request: GroupRequest) -> GroupRef:
            await asyncio.sleep(60)
            return scored(request.group_id, request.prompt, version=self.loaded[-1])

        return run_group

    async def stop(self) -> None:
        self.stopped = True


def scored(group_id: str, prompt: Prompt, *, version: int) -> GroupRef:
    sampled = TrajectorySummary(
        id=f"{group_id}:0",
        num_tokens=4,
        num_loss_tokens=2,
        oldest_version=version,
        newest_version=version,
        finish_reason="stop",
    )
    episode = EpisodeSummary(
        id=f"{group_id}/0",
        outcome=Outcome.GRADED,
        reward=version / 10,
        error=None,
        attempt=0,
        seconds=60.0,
        metrics={},
        trajectories=(sampled,),
    )
    return GroupRef(id=group_id, prompt_id=prompt.id, episodes=(episode,))


class Played:
    """One run from its first event to its end."""

    def __init__(self, config: Config, root: Path, *, faults: Sequence[Fault] = (), is_broken: bool = False) -> None:
        record = Record(root / "record.jsonl")
        world = World(seed=3, start=0, faults=faults, record=record)
        record.new_weights(parent=-1, version=0)
        self.run_dir = open_run_dir(root)
        self.serving: list[Serving] = []
        monitor = build_monitor(config.monitor, run_dir=self.run_dir.path, total_steps=config.run.steps)
        loop = VirtualLoop(on_event=lambda number: None, disk_s=lambda: 0.01, patience_s=100_000.0)

        async def main() -> dict[str, Any]:
            world.main = asyncio.current_task()
            running = rl.RLRun(config, run_dir=self.run_dir, monitor=monitor)
            await running.run()
            return running.summary()

        def make(*_: Any, **__: Any) -> Any:
            if is_broken:
                return Broken()
            self.serving.append(Serving())
            return self.serving[-1]

        try:
            with scripted(world, config), patch.object(rl, "EvalEngines", make):
                self.summary = run(main(), loop)
        finally:
            loop.close()
        self.rows = {int(row["step"]): row for row in read_metrics(self.run_dir.path)}

    def points(self) -> list[tuple[Any, ...]]:
        sql = "SELECT dataset, version, logged_version, score, reason FROM evaluations ORDER BY evaluation"
        return query(self.run_dir.path / LEDGER, sql)[1]


def test_shared_engines_evaluate_before_during_and_after_training(tmp_path: Path) -> None:
    played = Played(make_config(every=2, num_prompts=5, samples_per_prompt=2), tmp_path)
    assert [(version, logged) for _, version, logged, _, _ in played.points()] == [(0, 0), (2, 2), (4, 4), (6, 6)]
    for step in (0, 2, 4, 6):
        assert played.rows[step]["eval/score"] == played.rows[step]["eval/pass@1"]
        assert played.rows[step]["eval/lag_steps"] == 0
    assert "eval/score" not in played.rows[3]
    assert played.summary["eval_before"] == played.rows[0]["eval/score"]
    assert played.summary["eval_after"] == played.rows[6]["eval/score"]
    assert played.summary["fates"]["in_flight"] == 0


def test_training_does_not_wait_for_engines_of_the_evaluations_own(tmp_path: Path) -> None:
    config = make_config(every=1, mode="dedicated", overlap="skip", num_prompts=5)
    played = Played(config, tmp_path)
    scored = {version: score for _, version, _, score, _ in played.points() if score is not None}
    skipped = [reason for _, _, _, score, reason in played.points() if score is None]
    assert scored == {version: pytest.approx(version / 10) for version in scored}, "each has the score of its weights"
    assert {0, STEPS} <= set(scored), "the last weights are evaluated, whatever was left out before"
    assert skipped
    assert all(reason.startswith("the evaluation of step") for reason in skipped)
    for version, score in scored.items():
        assert played.rows[version]["eval/score"] == pytest.approx(score)
    assert played.rows[0]["eval/lag_steps"] > 0
    (serving,) = played.serving
    assert serving.stopped
    assert serving.loaded == sorted(scored)
    assert list((played.run_dir.evaluations / "snapshots").iterdir()) == []


def test_a_trainer_that_goes_back_has_one_point_for_each_of_its_weights(tmp_path: Path) -> None:
    config = make_config(every=1, mode="dedicated", num_prompts=5)
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    played = Played(config, tmp_path, faults=[Fault(kind="trainer_lost", nth=12, start=0)])
    final: dict[int, float] = {}
    for _, version, _, score, _ in played.points():
        if score is not None:
            final[version] = score
    assert set(final) == set(range(STEPS + 1))
    assert [played.rows[step]["eval/score"] for step in range(STEPS + 1)] == pytest.approx(
        [step / 10 for step in range(STEPS + 1)]
    )


def test_several_datasets_share_one_evaluation(tmp_path: Path) -> None:
    datasets = {"easy": DatasetConfig(split="a", num_prompts=3), "hard": DatasetConfig(split="b", num_prompts=4)}
    played = Played(make_config(at_start=False, datasets=datasets), tmp_path)
    assert [(dataset, version) for dataset, version, *_ in played.points()] == [("easy", 6), ("hard", 6)]
    row = played.rows[STEPS]
    assert row["eval/score"] == pytest.approx((row["eval/easy/score"] + row["eval/hard/score"]) / 2)


def test_evaluations_that_all_fail_leave_training_alone(tmp_path: Path) -> None:
    played = Played(make_config(every=3, mode="dedicated", num_prompts=5), tmp_path, is_broken=True)
    assert {reason for *_, reason in played.points()} == {"evaluating: EngineStartError: no GPU is left for it"}
    assert [version for _, version, *_ in played.points()] == [0, 3, 6, 6], "the last one is tried once more"
    assert played.summary["steps"] == STEPS
    assert (played.summary["eval_before"], played.summary["eval_after"]) == (None, None)
    assert not any("score" in name for row in played.rows.values() for name in row)
