"""Evaluation on the rollout engines: training groups finish first, and nothing that fails reaches the loop."""

from __future__ import annotations

import asyncio

import pytest
from eval_parts import ScriptedEngines, Told, make_log, make_scorer
from miles_core.evaluation.config import DatasetConfig
from miles_core.evaluation.evaluator import SharedEvaluator
from miles_rollout.dispatch import GroupRequest
from miles_rollout.producer import Gate
from miles_tito.records import Prompt, Sampling
from scripted_rollout import now, run_virtual


def make_shared(tmp_path, engines, told, *, gate=None, training=None, timeout_s=100.0, present=lambda: 0, **datasets):
    return SharedEvaluator(
        make_scorer(tmp_path, **datasets),
        run_group_into=engines.into,
        gate=gate or Gate(),
        idle=(training or engines).idle,
        log=make_log(told, present=present),
        timeout_s=timeout_s,
    )


def test_submissions_pause_and_groups_in_flight_finish_before_the_evaluation(tmp_path):
    async def main():
        engines, told, gate = ScriptedEngines(), Told(), Gate()
        training = ScriptedEngines()
        training.seconds = 7.0
        evaluator = make_shared(tmp_path, engines, told, gate=gate, training=training)

        async def submit():
            await gate.wait_open()
            await training(GroupRequest(prompt=Prompt(id="p"), group_id="g1", group_size=2))

        running = asyncio.create_task(training(GroupRequest(prompt=Prompt(id="p"), group_id="g0", group_size=2)))
        evaluation = asyncio.create_task(evaluator.begin(0))
        await asyncio.sleep(1)
        submitted = asyncio.create_task(submit())
        await asyncio.sleep(5)
        assert engines.groups == [], "the group in flight still runs"
        metrics = await evaluation
        assert (now(), len(engines.groups)) == (8.0, 3)
        assert metrics["eval/score"] == 0.5
        await asyncio.gather(running, submitted)
        assert (now(), training.groups) == (15.0, ["g0", "g1"]), "submitted at 1, begun when the evaluation was over"

    run_virtual(main())


def test_a_group_that_just_passed_the_gate_is_in_flight_too(tmp_path):
    async def main():
        engines, training = ScriptedEngines(), ScriptedEngines()
        evaluator = make_shared(tmp_path, engines, Told(), training=training)
        group = asyncio.create_task(
            training(GroupRequest(prompt=Prompt(id="p"), group_id="g0", group_size=2))
        )  # has not begun
        await evaluator.begin(0)
        assert group.done()
        assert now() == 2.0

    run_virtual(main())


def test_each_dataset_has_its_own_prompts_sampling_and_names(tmp_path):
    async def main():
        engines, told = ScriptedEngines(lambda prompt: [1.0, 1.0, 0.0, 0.0] if "hard" in prompt else [1.0]), Told()
        greedy = Sampling(temperature=0.0)
        evaluator = make_shared(
            tmp_path,
            engines,
            told,
            easy=DatasetConfig(sampling=greedy),
            hard=DatasetConfig(samples_per_prompt=4),
        )
        metrics = await evaluator.begin(0)
        assert metrics["eval/easy/score"] == 1.0
        assert (metrics["eval/hard/score"], metrics["eval/hard/pass@4"]) == (0.5, 1.0)
        assert metrics["eval/score"] == 0.75, "the mean of the datasets"
        assert {row["dataset"]: row["score"] for row in told.rows} == {"easy": 1.0, "hard": 0.5}
        assert engines.samplings.count(greedy) == engines.samplings.count(None) == 3
        assert engines.most_running == 6, "side by side"

    run_virtual(main())


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        ("groups", "evaluating: ConnectionError: the session server is gone"),
        ("slow", "evaluating took longer than `eval.timeout_s` = 100 s"),
        ("in_flight", "waiting for the groups in flight took longer than `eval.timeout_s` = 100 s"),
        ("failed", "6 of 6 episodes failed, 6 with: infra_abort: the engine is gone"),
        ("behind", "its tokens were sampled by version 3 of the weights, not by 4"),
    ],
)
def test_a_failure_of_any_kind_is_a_skipped_point_with_its_reason(tmp_path, breaks, reason):
    async def main():
        engines, told, gate = ScriptedEngines(), Told(), Gate()
        engines.version = 4
        training = ScriptedEngines()
        training.seconds = 1e6 if breaks == "in_flight" else 1.0
        group = asyncio.create_task(training(GroupRequest(prompt=Prompt(id="p"), group_id="g0", group_size=2)))
        if breaks == "groups":
            engines.broken = ConnectionError("the session server is gone")
        elif breaks == "slow":
            engines.seconds = 1000.0
        elif breaks == "failed":
            engines.play = lambda prompt: [None, None]
        elif breaks == "behind":
            engines.version = 3
        evaluator = make_shared(tmp_path, engines, told, gate=gate, training=training)
        metrics = await evaluator.begin(4)
        assert not any("score" in name or "pass@" in name for name in metrics), "no score, least of all 0"
        assert metrics["eval/skipped"] == 1
        (row,) = told.rows
        assert (row["reason"], row["score"], row["version"]) == (reason, None, 4)
        await asyncio.wait_for(gate.wait_open(), timeout=1)
        assert engines.running == 0, "what was given up is cancelled"
        group.cancel()

    run_virtual(main())


def test_one_dataset_without_a_score_does_not_take_the_others_with_it(tmp_path):
    async def main():
        engines, told = ScriptedEngines(lambda prompt: [None] if "broken" in prompt else [1.0]), Told()
        evaluator = make_shared(tmp_path, engines, told, broken=DatasetConfig(), sound=DatasetConfig())
        metrics = await evaluator.begin(0)
        assert metrics["eval/sound/score"] == 1.0
        assert metrics["eval/broken/failed"] == 1.0
        assert "eval/score" not in metrics, "a mean over fewer datasets would not compare"
        assert metrics["eval/skipped"] == 1

    run_virtual(main())


def test_conversations_of_the_newest_evaluations_are_kept(tmp_path):
    async def main():
        engines = ScriptedEngines()
        evaluator = make_shared(tmp_path, engines, Told())
        for step in (0, 2, 4, 6):
            engines.version = step
            await evaluator.begin(step)
        assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["step-000004", "step-000006"]
        engines.version = 5
        await evaluator.begin(5)  # the run went back
        assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["step-000004", "step-000005"]

    run_virtual(main())


def test_a_point_that_cannot_be_recorded_ends_the_run(tmp_path):
    async def main():
        told = Told()
        told.full = True
        with pytest.raises(OSError, match="no space left for the ledger"):
            await make_shared(tmp_path, ScriptedEngines(), told).begin(0)

    run_virtual(main())
