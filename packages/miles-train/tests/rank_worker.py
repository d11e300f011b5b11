"""Real trainers of one and of two ranks for `test_ranks.py`: rank_worker.py MODEL FOLDER_1 FOLDER_2.

The ranks of the second and third part are new processes: one continues from the checkpoint of the first part, one
dies while it writes another.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from miles_tito import Sample, VersionSpan
from miles_train import (
    BatchError,
    CheckpointError,
    FSDPConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    batches_of,
)
from miles_train.checkpoint import block_file
from miles_train.fsdp import FSDPTrainer

VOCAB = 67
PARTS = ("run", "resume", "regroup", "die")
DEATHS = ("1", "40000", "80000")
"""Bytes into the file of a rank."""


def samples() -> list[Sample]:
    """Uneven lengths, and too few rows for two ranks: one has an empty micro-batch."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for i, length in enumerate([30, 16, 29]):
        mask = np.arange(length) >= 3
        made.append(
            Sample(
                id=f"s{i}",
                episode_id=f"e{i // 2}",
                group_id="g",
                prompt_id="p",
                tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, rng.uniform(-5, -3.5, length), 0).astype(np.float32),
                advantage=float(rng.normal()),
                loss_denominator=60,
                versions=(VersionSpan(start=0, end=length, version=0),),
            )
        )
    return made


class Worker:
    def __init__(self, rank: int, ranks: int, model: Path, folder: Path) -> None:
        self.rank = rank
        self.ranks = ranks
        self.model = model
        self.folder = folder
        self.report: dict[str, object] = {}
        self.made = 0

    def trainer(self, settings: TrainConfig) -> FSDPTrainer:
        self.made += 1
        made = FSDPTrainer(self.model, rank=self.rank, init_method=f"file://{self.folder}/meet-{self.made}")
        made.setup(settings)
        return made

    def config(self, **changes: object) -> TrainConfig:
        known = {
            "ranks": self.ranks,
            "threads": 1,
            "device": "cpu",
            "token_budget": 30,
            "optimizer": OptimizerConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.05),
            "schedule": ScheduleConfig(kind="cosine", total_steps=9),
            "collective_timeout_s": 60.0,
        }
        return TrainConfig(**(known | changes))  # pyright: ignore[reportArgumentType]

    def learn(self, name: str, settings: TrainConfig, steps: int = 2) -> FSDPTrainer:
        """Train, and leave metrics and this rank's shards behind."""
        trainer = self.trainer(settings)
        batches = batches_of(samples(), settings, rank=self.rank)
        self.report[name] = [dict(trainer.train(batches).metrics) for _ in range(steps)]
        self.keep_shards(name, trainer)
        return trainer

    def keep_shards(self, name: str, trainer: FSDPTrainer) -> None:
        torch.save([tuple(shard) for shard in trainer.shards()], self.folder / f"{name}-{self.rank}.pt")

    def run(self) -> None:
        plain = self.learn("plain", self.config())
        plain.export_hf(self.folder / "hf")
        plain.begin_save(self.folder / "checkpoint")
        batches = self.go_on("continued", plain)  # the checkpoint is written meanwhile
        plain.finish_save()
        if self.ranks > 1:
            self.report["unequal"] = self.refused(plain, batches)
        plain.close()

        loss = LossConfig(normalization="token", old_logprobs="trainer", tis_cap=2.0, kl_coef=0.1)
        self.learn(
            "everything", self.config(loss=loss, minibatches=2, fsdp=FSDPConfig(activation_checkpointing=True))
        ).close()
        self.learn("mixed", self.config(dtype="bfloat16"), steps=1).close()
        if self.ranks > 1:
            self.report["watchdog"] = self.deserted()

    def go_on(self, name: str, trainer: FSDPTrainer) -> list:
        """Two more steps, and draws from every random generator."""
        batches = batches_of(samples(), self.config(), rank=self.rank)
        draws = [float(torch.rand(())), random.random(), float(np.random.random())]
        self.report[name] = [dict(trainer.train(batches).metrics) for _ in range(2)]
        self.report[f"{name} draws"] = draws
        self.report[f"{name} version"] = trainer.version
        self.keep_shards(name, trainer)
        return batches

    def resume(self) -> None:
        """In a new process: what `run` did after its checkpoint."""
        trainer = self.trainer(self.config())
        trainer.load(self.folder / "checkpoint")
        self.go_on("resumed", trainer)
        trainer.close()

    def regroup(self) -> None:
        """One rank goes on from the checkpoint of several."""
        trainer = self.trainer(self.config())
        trainer.load(self.folder / "checkpoint")
        self.keep_shards("loaded", trainer)
        self.go_on("regrouped", trainer)

    def die(self) -> None:
        """Replace the checkpoint by one with another version; the last rank is killed after so many bytes."""
        trainer = self.trainer(self.config())
        trainer.load(self.folder / "checkpoint")
        trainer.version = 99
        if self.rank == self.ranks - 1:
            block_file._write = killed_after(int(os.environ["DIE_AFTER"]), block_file._write)
        try:
            trainer.save(self.folder / "checkpoint")
        except CheckpointError as error:
            self.report["bereaved"] = str(error)

    def refused(self, trainer: FSDPTrainer, batches: list) -> str:
        """Rank 1 brings one micro-batch too few."""
        if self.rank == 1:
            batches = [replace(batches[0], micro_batches=batches[0].micro_batches[:-1])]
        try:
            trainer.train(batches)
        except BatchError as error:
            return str(error)
        return "trained"

    def deserted(self) -> str:
        """Rank 1 never comes."""
        settings = self.config(collective_timeout_s=8.0)
        trainer = self.trainer(settings)
        if self.rank == 1:
            return "stayed away"
        try:
            trainer.train(batches_of(samples(), settings, rank=self.rank))
        except RuntimeError as error:
            return str(error)
        return "trained"


def killed_after(limit: int, write: Callable[[int, memoryview], None]) -> Callable[[int, memoryview], None]:
    """`write`, but the process is gone in the middle of it, `limit` bytes into everything written."""
    written = 0

    def dying(descriptor: int, data: memoryview) -> None:
        nonlocal written
        write(descriptor, data[: limit - written])
        written += len(data)
        if written >= limit:
            os.kill(os.getpid(), signal.SIGKILL)

    return dying


def run_rank(part: str, rank: int, ranks: int, model: Path, folder: Path) -> None:
    worker = Worker(rank, ranks, model, folder)
    worker.made = 100 * PARTS.index(part) + int(os.environ.get("DIE_AFTER", "0"))  # every meeting has its own file
    getattr(worker, part)()
    (folder / f"{part}-{rank}.json").write_text(json.dumps(worker.report))


def run_part(part: str, model: Path, folders: dict[Path, int]) -> list[int]:
    """All ranks of every folder at once, each in a process of its own; returns their exit statuses."""
    fork = multiprocessing.get_context("fork")  # torch and transformers are imported once
    children = [
        fork.Process(target=run_rank, args=(part, rank, ranks, model, folder), daemon=True)
        for folder, ranks in folders.items()
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode or 0 for child in children]


def main() -> int:
    model, one, two = map(Path, sys.argv[1:])
    plan: list[tuple[str, str, dict[Path, int], list[int]]] = [
        ("run", "", {one: 1, two: 2}, [0, 0, 0]),
        ("resume", "", {one: 1, two: 2}, [0, 0, 0]),
        ("regroup", "", {two: 1}, [0]),
        *(("die", limit, {one: 1, two: 2}, [-signal.SIGKILL, 0, -signal.SIGKILL]) for limit in DEATHS),
    ]
    for part, limit, folders, expected in plan:
        os.environ["DIE_AFTER"] = limit or "0"
        if (statuses := run_part(part, model, folders)) != expected:
            print(part, limit, statuses, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    import transformers

    assert transformers.AutoModelForCausalLM, "loads its lazy modules before the fork"
    sys.exit(main())
