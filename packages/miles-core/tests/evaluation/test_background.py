"""Evaluation beside training: bounded overlap, points at their own step with their lag, failures, clean ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from eval_parts import ScriptedEngines, Told, make_log, make_scorer
from miles_core.evaluation.background import BackgroundEvaluator
from miles_core.evaluation.points import DatasetScore
from miles_core.evaluation.scoring import DedicatedScorer
from scripted_rollout import now, run_virtual

Overlap = Literal["backpressure", "skip"]


class Trainer:
    """Exports in a second."""

    def __init__(self) -> None:
        self.step = 0
        self.refuse: Exception | None = None

    async def export(self, folder: Path) -> None:
        await asyncio.sleep(1)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(self.step))
        if self.refuse is not None:
            raise self.refuse


class SlowScorer:
    """Takes ten seconds; the score is what the snapshot holds."""

    def __init__(self) -> None:
        self.seconds = 10.0
        self.most_running = self.running = 0
        self.closed = False

    async def __call__(self, step: int, snapshot: Path) -> Sequence[DatasetScore]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.seconds)
            score = float((snapshot / "config.json").read_text()) / 100
            return [DatasetScore(dataset="eval", score=score, metrics={"eval/score": score}, text="fine")]
        finally:
            self.running -= 1

    async def close(self) -> None:
        self.closed = True


def make_background(tmp_path, scorer, trainer, told, *, overlap: Overlap = "backpressure", timeout_s=100.0):
    return BackgroundEvaluator(
        scorer,
        snapshots=tmp_path / "snapshots",
        export=trainer.export,
        log=make_log(told, present=lambda: trainer.step),
        log_late=told.log_late,
        overlap=overlap,
        timeout_s=timeout_s,
    )


async def train(trainer, evaluator, steps, *, every=1):
    """Steps of four seconds; returns when each began its evaluation."""
    for step in range(1, steps + 1):
        await asyncio.sleep(4)
        trainer.step = step
        if step % every == 0:
            await evaluator.begin(step)


def test_training_goes_on_while_a_snapshot_is_evaluated(tmp_path):
    async def main():
        trainer, told = Trainer(), Told()
        evaluator = make_background(tmp_path, SlowScorer(), trainer, told)
        await train(trainer, evaluator, 7, every=4)
        assert now() == 7 * 4 + 1, "one second for the snapshot, none for the evaluation"
        await evaluator.drain()
        ((step, metrics),) = told.late
        assert (step, metrics["eval/score"]) == (4, 0.04), "the weights of step 4, logged at step 4"
        assert metrics["eval/lag_steps"] == 2
        assert told.rows[0]["logged_version"] == 6
        assert list((tmp_path / "snapshots").iterdir()) == []

    run_virtual(main())


def test_backpressure_waits_for_the_evaluation_before_and_loses_no_point(tmp_path):
    async def main():
        trainer, told, scorer = Trainer(), Told(), SlowScorer()
        evaluator = make_background(tmp_path, scorer, trainer, told)
        await train(trainer, evaluator, 4)
        await evaluator.drain()
        assert [(step, metrics["eval/score"]) for step, metrics in told.late] == [(s, s / 100) for s in (1, 2, 3, 4)]
        assert scorer.most_running == 1

    run_virtual(main())


def test_skip_leaves_points_out_with_the_reason_and_never_waits(tmp_path):
    async def main():
        trainer, told, scorer = Trainer(), Told(), SlowScorer()
        evaluator = make_background(tmp_path, scorer, trainer, told, overlap="skip")
        await train(trainer, evaluator, 4)
        assert now() <= 4 * 4 + 2
        await evaluator.drain()
        assert [step for step, _ in told.late] == [1, 4]
        assert [row["reason"] for row in told.rows if row["score"] is None] == [
            "the evaluation of step 1 still runs",
            "the evaluation of step 1 still runs",
        ]
        assert scorer.most_running == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        ("export", "writing a snapshot of the weights: OSError: no space left"),
        ("slow", "evaluating took longer than `eval.timeout_s` = 100 s"),
    ],
)
def test_a_failure_is_a_skipped_point_and_the_next_one_is_made(tmp_path, breaks, reason):
    async def main():
        trainer, told, scorer = Trainer(), Told(), SlowScorer()
        evaluator = make_background(tmp_path, scorer, trainer, told)
        trainer.refuse = OSError("no space left") if breaks == "export" else None
        scorer.seconds = 1000.0 if breaks == "slow" else 10.0
        await evaluator.begin(1)
        await evaluator.drain()
        trainer.refuse, scorer.seconds, trainer.step = None, 10.0, 2
        await evaluator.begin(2)
        await evaluator.drain()
        assert [(row["version"], row["score"], row["reason"]) for row in told.rows] == [
            (1, None, reason),
            (2, 0.02, ""),
        ]
        assert list((tmp_path / "snapshots").iterdir()) == []

    run_virtual(main())


def test_a_run_that_goes_back_gives_up_the_evaluation_of_weights_that_are_gone(tmp_path):
    async def main():
        trainer, told = Trainer(), Told()
        evaluator = make_background(tmp_path, SlowScorer(), trainer, told)
        await train(trainer, evaluator, 3, every=3)
        await evaluator.rewind(2)
        await evaluator.drain()
        assert told.late == []
        assert told.reasons() == ["the run went back to step 2"]
        await evaluator.begin(3)
        await evaluator.rewind(3)
        await evaluator.begin(3)
        await evaluator.drain()
        assert [step for step, _ in told.late] == [3], "its weights are still there"

    run_virtual(main())


def test_closing_gives_up_what_runs_and_stops_what_was_started(tmp_path):
    async def main():
        trainer, told, scorer = Trainer(), Told(), SlowScorer()
        evaluator = make_background(tmp_path, scorer, trainer, told)
        await evaluator.begin(1)
        await asyncio.sleep(1)
        await evaluator.close()
        assert (scorer.running, scorer.closed, told.late) == (0, True, [])
        assert list((tmp_path / "snapshots").iterdir()) == []

    run_virtual(main())


def test_a_point_that_cannot_be_recorded_ends_the_run_at_the_next_occasion(tmp_path):
    async def main():
        trainer, told = Trainer(), Told()
        told.full = True
        evaluator = make_background(tmp_path, SlowScorer(), trainer, told)
        await evaluator.begin(1)
        with pytest.raises(OSError, match="no space left for the ledger"):
            await evaluator.drain()
        await evaluator.close()

    run_virtual(main())


def test_snapshots_of_a_process_that_died_are_removed(tmp_path):
    (tmp_path / "snapshots" / "step-000003").mkdir(parents=True)
    make_background(tmp_path, SlowScorer(), Trainer(), Told())
    assert not (tmp_path / "snapshots").exists()


class Serving:
    """Engines of their own in memory."""

    made: list[Serving]

    def __init__(self, engines: ScriptedEngines, made: list[Serving], *, fails: str = "") -> None:
        self.engines, self.fails, self.stopped = engines, fails, False
        made.append(self)

    async def start(self) -> None:
        await asyncio.sleep(20)
        if self.fails == "start":
            raise RuntimeError("the engine did not come up\nits log …")

    async def load(self, snapshot: Path, version: int) -> None:
        assert (snapshot / "config.json").read_text() == str(version)
        if self.fails == "load":
            raise ConnectionError("the engine is gone")
        self.engines.version = version

    def run_group_into(self, folder: Path | None) -> ScriptedEngines:
        return self.engines.into(folder)

    async def stop(self) -> None:
        self.stopped = True


def test_dedicated_engines_start_once_and_load_every_snapshot(tmp_path):
    async def main():
        trainer, told, made = Trainer(), Told(), []
        engines = ScriptedEngines()
        scorer = DedicatedScorer(make_scorer(tmp_path), serving=lambda: Serving(engines, made))
        evaluator = make_background(tmp_path, scorer, trainer, told)
        for step in (1, 2, 3):
            trainer.step = step
            await evaluator.begin(step)
        await evaluator.drain()
        assert [row["score"] for row in told.rows] == [0.5, 0.5, 0.5]
        assert len(made) == 1
        await evaluator.close()
        assert made[0].stopped

    run_virtual(main())


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("start", "evaluating: RuntimeError: the engine did not come up"),
        ("load", "evaluating: ConnectionError: the engine is gone"),
        ("episodes", "6 of 6 episodes failed, 6 with: infra_abort: the engine is gone"),
    ],
)
def test_dedicated_engines_that_fail_cost_a_point_and_are_started_anew(tmp_path, fails, reason):
    async def main():
        trainer, told, made = Trainer(), Told(), []
        engines = ScriptedEngines()
        engines.play = lambda prompt: [None, None] if fails == "episodes" and len(made) == 1 else [0.0, 1.0]
        scorer = DedicatedScorer(
            make_scorer(tmp_path), serving=lambda: Serving(engines, made, fails="" if made else fails)
        )
        evaluator = make_background(tmp_path, scorer, trainer, told)
        for step in (1, 2):
            trainer.step = step
            await evaluator.begin(step)
        await evaluator.drain()
        assert [(row["score"], row["reason"]) for row in told.rows] == [(None, reason), (0.5, "")]
        assert [serving.stopped for serving in made] == [True, False]
        await evaluator.close()

    run_virtual(main())
