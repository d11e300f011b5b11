"""Two FSDP ranks that train in low precision and export what they hold: low_precision_worker.py MODEL FOLDER FORMAT."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch
from miles_quant import Recipe, largest_over_ranks, prepare_model, quantize_shards, with_digests
from miles_tito import Sample, VersionSpan
from miles_train import FSDPConfig, OptimizerConfig, TrainConfig, batches_of, score
from miles_train.fsdp import FSDPTrainer

RANKS = 2


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for i, length in enumerate([30, 16]):
        mask = np.arange(length) >= 3
        made.append(
            Sample(
                id=f"s{i}",
                episode_id=f"e{i}",
                group_id="g",
                prompt_id="p",
                tokens=rng.integers(0, 96, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -4.5, 0).astype(np.float32),
                advantage=float(1 - 2 * i),
                loss_denominator=int(mask.sum()),
                versions=(VersionSpan(start=0, end=length, version=0),),
            )
        )
    return made


def run(rank: int, model: str, folder: str, format: str) -> None:
    config = TrainConfig(
        ranks=RANKS,
        threads=1,
        device="cpu",
        fsdp=FSDPConfig(layout="padded"),
        token_budget=64,
        optimizer=OptimizerConfig(lr=1e-2),
        collective_timeout_s=60.0,
    )
    recipe = Recipe(format=format, num_layers=2)
    trainer = FSDPTrainer(model, rank=rank, init_method=f"file://{folder}/meet")
    trainer.setup(config, prepare_model=functools.partial(prepare_model, recipe=recipe))
    (batch,) = batches_of(samples(), config, rank=rank)
    trainer.train([batch])
    digests = []
    packed = with_digests(quantize_shards(trainer.shards, recipe, reduce_max=largest_over_ranks), digests)
    shards = [tuple(shard) for shard in packed]
    (scored,) = score(trainer, batch)
    trainer.export_hf(Path(folder) / "trained")
    torch.save({"shards": shards, "digests": digests, "scored": scored}, Path(folder) / f"rank-{rank}.pt")
    trainer.close()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, *sys.argv[1:4])) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    failed = [process for process in processes if process.exitcode != 0]
    for process in failed:
        process.kill()
    sys.exit(f"{len(failed)} of {RANKS} ranks failed or did not end" if failed else 0)
