"""Two trainer ranks as processes: a checkpoint is written beside training, and new processes go on from it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from miles_core.cluster import TrainerRanks, cluster
from miles_core.config import RayConfig
from miles_rollout.advantages import advantages_by_episode
from miles_tito.records import Episode, Group, Outcome, Trajectory, VersionSpan
from miles_tito.records.summary import GroupRef, summarize
from miles_train.config import OptimizerConfig, ScheduleConfig, TrainConfig
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CONFIG = TrainConfig(
    ranks=2,
    device="cpu",
    threads=1,
    token_budget=64,
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(kind="cosine", total_steps=6),
    collective_timeout_s=60.0,
)


def groups(seed: int) -> list[GroupRef]:
    rng = np.random.default_rng(seed)

    def trajectory(name: str) -> Trajectory:
        mask = np.arange(12) >= 4
        return Trajectory(
            id=name,
            tokens=rng.integers(300, 440, 12).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -5.0, 0).astype(np.float32),
            versions=(VersionSpan(start=4, end=12, version=0),),
        )

    made: list[GroupRef] = []
    for name in ("a", "b"):
        episodes = tuple(
            Episode(
                id=f"{name}/{e}",
                prompt_id=name,
                group_id=name,
                outcome=Outcome.GRADED,
                reward=float(e),
                trajectories=(trajectory(f"{name}/{e}.0"),),
            )
            for e in range(2)
        )
        group = Group(id=name, prompt_id=name, episodes=episodes)
        made.append(summarize(group, handle=ray.put(group)))
    return made


async def step(trainers: TrainerRanks, seed: int) -> Any:
    return await trainers.train(groups(seed), advantages=partial(advantages_by_episode, advantage="dr_grpo"))


async def play(model: Path, folder: Path) -> None:
    async with cluster(RayConfig(num_cpus=2)):
        trainers = TrainerRanks(CONFIG)
        await trainers.setup(CONFIG, model)
        await step(trainers, 1)
        await trainers.begin_save(folder / "at-1")
        saved = asyncio.create_task(trainers.finish_save())
        for seed in (2, 3):
            trained = await step(trainers, seed)
        await saved
        assert trained.version == 3
        await trainers.export(folder / "unbroken")

        await trainers.restart()
        await trainers.setup(CONFIG, model)
        await trainers.load(folder / "at-1")
        for seed in (2, 3):
            again = await step(trainers, seed)
        assert again.version == 3
        drop = "trainer/step_seconds"
        assert {k: v for k, v in again.metrics.items() if k != drop} == {
            k: v for k, v in trained.metrics.items() if k != drop
        }
        await trainers.export(folder / "resumed")
        await trainers.stop()


def test_new_ranks_go_on_bit_for_bit_from_a_checkpoint_written_beside_training(model: Path, tmp_path: Path) -> None:
    """Faults D06, D07. In a process of its own: a fork beside a thread that once held a gloo group hangs."""
    command = [sys.executable, __file__, str(model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "at-1" / "trainer.json").read_text())
    assert (manifest["version"], len(manifest["files"])) == (1, 2)
    unbroken, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("unbroken", "resumed"))
    assert unbroken.keys() == resumed.keys()
    assert all(np.array_equal(unbroken[name], resumed[name]) for name in unbroken)


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1]), Path(sys.argv[2])))
