"""A run directory made of numbers from a seed: what a report shows without training anything."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from miles_core.durable.spool import SpoolWriter
from miles_core.monitor import JsonlMonitor, RunSummary
from miles_tito.records import Episode, Group, Outcome, Trajectory, VersionSpan
from tokenizers import Tokenizer, decoders, models

sys.path.insert(0, str(Path(__file__).parent))

CONVERSATION = [
    ("<|im_start|>system\n", "You compute with a calculator. Call the tool", ", then answer", ".", "<|im_end|>\n"),
    ("<|im_start|>user\n", "What is ", "17", " * ", "23", " + ", "4", "?", "<|im_end|>\n", "<|im_start|>assistant\n"),
    (
        "I",
        " will",
        " multiply",
        " first",
        ".\n",
        "<tool_call>",
        '{"name": ',
        '"multiply"',
        "}",
        "</tool_call>",
        "<|im_end|>",
    ),
    ("\n<|im_start|>tool\n", "391", "<|im_end|>\n", "<|im_start|>assistant\n"),
    ("391", " plus", " 4", " is", " 395", ".\n", "Answer", ": ", "395", "<|im_end|>"),
]
SAMPLED = (False, False, True, False, True)


@pytest.fixture
def make_run(tmp_path):
    """`make_run(steps=…, finished=…, texts=…)` -> the run directory."""

    def make(name: str = "quickstart", *, steps: int = 60, finished: bool = True, texts=CONVERSATION) -> Path:
        return write_run(tmp_path / name, steps=steps, finished=finished, texts=texts)

    return make


def write_run(path: Path, *, steps: int, finished: bool, texts=CONVERSATION) -> Path:
    path.mkdir(parents=True)
    rng = random.Random(0)
    config = {"run": {"name": path.name, "steps": steps}, "model": {"path": "tiny-qwen3", "dtype": "float32"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13.0"}}))
    monitor = JsonlMonitor(path)
    monitor.log(0, {"eval/score": 0.31, "eval/stderr": 0.03})
    for step in range(1, steps + 1):
        monitor.log(step, metrics(step, steps, rng))
    write_conversations(path, texts, rng, versions=range(0, steps, max(steps // 12, 1)))
    if finished:
        monitor.finish(
            RunSummary(
                status="finished",
                steps=steps,
                seconds=97.0,
                eval_before=0.31,
                eval_after=0.91,
                samples_per_s=41.3,
                engine_utilisation=0.78,
                trainer_utilisation=0.41,
                fates={"issued": 18 * steps, "trained": 16 * steps, "filtered": 2 * steps, "in_flight": 0},
                report=str(path / "report.html"),
            )
        )
    return path


def metrics(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    progress = 1 / (1 + math.exp(-10 * (step / steps - 0.4)))
    reward = 0.3 + 0.62 * progress + rng.gauss(0, 0.025)
    train, sync, wait = 0.42 + rng.random() * 0.08, 0.05 + rng.random() * 0.02, rng.random() ** 3 * 0.6
    result = {
        "reward/mean": reward,
        "reward/std": math.sqrt(max(reward * (1 - reward), 0.01)),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/group_std": 0.3 * (1 - progress),
        "episode/tokens": 46 - 14 * progress + rng.gauss(0, 1),
        "episode/tokens_max": 96 - 30 * progress + rng.gauss(0, 6),
        "episode/truncated": 0.12 * (1 - progress),
        "env/format_ok": 0.5 + progress / 2,
        "staleness/mean": 0.5 + rng.random() * 0.4,
        "staleness/max": 1.0,
        "logprob_gap/mean": 4e-3 * (1 + rng.random()),
        "logprob_gap/max": 8e-2 * (1 + 2 * rng.random()),
        "logprob_gap/same_version_max": 3e-6 * (1 + rng.random()),
        f"logprob_gap/version_{step - 1}": 8e-7 * (1 + rng.random()),
        f"logprob_gap/version_{step - 2}": 6e-3 * (1 + rng.random()),
        "loss/policy": rng.gauss(-0.01, 0.02),
        "ratio/clipped": 0.02 * rng.random(),
        "optimizer/grad_norm": 0.6 + 0.3 * rng.random(),
        "optimizer/lr": 1e-4,
        "time/take_wait": wait,
        "time/train": train,
        "time/sync": sync,
        "time/on_step": 0.01,
        "time/step": wait + train + sync + 0.05,
        "engine/tokens_per_s": 5200 + rng.gauss(0, 400),
        "engine/utilisation": 0.75 + 0.1 * rng.random(),
        "trainer/utilisation": train / (wait + train + sync + 0.05),
        "fate/issued": 18.0 * step + 16,
        "fate/trained": 16.0 * step,
        "fate/filtered": float(step + (step > steps / 2) * (step - steps // 2)),
        "fate/stale": float(step // 10),
        "fate/in_flight": 16.0,
    }
    if step % 10 == 0:
        result |= {"eval/score": 0.31 + 0.6 * progress, "eval/stderr": 0.03 - 0.015 * progress}
    return result


def write_conversations(path: Path, texts, rng: random.Random, *, versions) -> None:
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(t for turn in texts for t in turn))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.decoder = decoders.Fuse()
    (path / "model").mkdir()
    tokenizer.save(str(path / "model" / "tokenizer.json"))
    ids = [vocabulary[text] for turn in texts for text in turn]
    mask = [sampled for turn, sampled in zip(texts, SAMPLED, strict=True) for _ in turn]
    spool = SpoolWriter(path / "trajectories", "worker-0")
    for version in versions:
        episodes = [
            episode(f"g{version}", i, trajectory(f"g{version}-{i}", ids, mask, version, rng), reward=float(i % 2))
            for i in range(4)
        ]
        spool.append(Group(id=f"g{version}", prompt_id=f"multiply-{version}", episodes=tuple(episodes)))
    spool.close()


def trajectory(name: str, ids: list[int], mask: list[bool], version: int, rng: random.Random) -> Trajectory:
    sampled = [i for i, m in enumerate(mask) if m]
    change = sampled[len(sampled) // 2]
    return Trajectory(
        id=name,
        tokens=np.array(ids),
        loss_mask=np.array(mask),
        logprobs=np.array([-rng.expovariate(1.6) if m else 0.0 for m in mask], dtype=np.float32),
        versions=(
            VersionSpan(start=sampled[0], end=change, version=version),
            VersionSpan(start=change, end=sampled[-1] + 1, version=version + 1),
        ),
    )


def episode(group_id: str, number: int, told: Trajectory, *, reward: float) -> Episode:
    return Episode(
        id=f"{group_id}-{number}",
        prompt_id=f"multiply-{group_id[1:]}",
        group_id=group_id,
        outcome=Outcome.GRADED,
        reward=reward,
        trajectories=(told,),
    )
