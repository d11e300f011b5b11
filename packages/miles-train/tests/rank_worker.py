"""Real trainers of one and of two ranks for `test_ranks.py`: rank_worker.py MODEL FOLDER_1 FOLDER_2."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from miles_tito import Sample, VersionSpan
from miles_train import BatchError, LossConfig, OptimizerConfig, TrainConfig, batches_of
from miles_train.fsdp import FSDPTrainer

VOCAB = 67


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
        plain.save(self.folder / "checkpoint")
        batches = batches_of(samples(), self.config(), rank=self.rank)
        self.report["continued"] = dict(plain.train(batches).metrics)
        plain.load(self.folder / "checkpoint")
        self.report["resumed"] = dict(plain.train(batches).metrics)
        self.report["resumed version"] = plain.version
        if self.ranks > 1:
            self.report["unequal"] = self.refused(plain, batches)
        plain.close()

        loss = LossConfig(normalization="token", old_logprobs="trainer", tis_cap=2.0, kl_coef=0.1)
        self.learn("everything", self.config(loss=loss, minibatches=2, activation_checkpointing=True)).close()
        self.learn("mixed", self.config(dtype="bfloat16"), steps=1).close()
        if self.ranks > 1:
            self.report["watchdog"] = self.deserted()

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


def run_rank(rank: int, ranks: int, model: Path, folder: Path) -> None:
    worker = Worker(rank, ranks, model, folder)
    worker.run()
    (folder / f"report-{rank}.json").write_text(json.dumps(worker.report))


def main() -> int:
    model, *folders = map(Path, sys.argv[1:])
    fork = multiprocessing.get_context("fork")  # torch and transformers are imported once
    children = [
        fork.Process(target=run_rank, args=(rank, ranks, model, folder), daemon=True)
        for ranks, folder in enumerate(folders, start=1)
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return max(abs(child.exitcode or 0) for child in children)


if __name__ == "__main__":
    import transformers

    assert transformers.AutoModelForCausalLM, "loads its lazy modules before the fork"
    sys.exit(main())
