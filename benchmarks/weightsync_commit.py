"""Staged pushes end to end: receivers around plain modules of SmolLM2's shapes in bfloat16, no engine beside them.

135M has more tensors than 1.7B, at a thirteenth of the bytes: what each costs by itself shows in the difference.

`pause_s` is what a running request sees; `commit_cpu_s` is the CPU time of the engine's thread in it: applying, and
checking every parameter afterwards. `broadcast` is one `torch.distributed.broadcast` on gloo of the same bytes between
two processes, without packing, checking or loading. A step changes 1.6 % of the values by one unit in the last place,
as Adam does at a learning rate of 1e-6.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from miles_weightsync import PushConfig
from miles_weightsync.push import Pusher

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/miles-weightsync/tests"))

import staged_bed
from miles_weightsync.planner import ModelShape

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SIZES = {
    "135M": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "1.7B": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 8192,
    },
}
CHANGED = 0.016
Rows = dict[str, dict[str, float]]


def measure(*, quick: bool = False) -> Rows:
    """Rows by way: GiB pushed, bytes sent over bytes of the model, seconds, and what each costs a GiB of model."""
    torch.set_num_threads(1)
    rows: Rows = {}
    rows |= _size("135M", ["shm", "tcp"], quick=quick)
    if not quick:
        rows |= _size("1.7B", ["shm"], quick=False)
    return rows


def _size(size: str, transports: Sequence[Literal["shm", "tcp"]], *, quick: bool) -> Rows:
    shape = {**SMOLLM2, **SIZES[size], **({"num_hidden_layers": 2} if quick else {})}
    staged_bed.CONFIG.clear()
    staged_bed.CONFIG.update(shape)
    staged_bed.SHAPE = ModelShape.from_hf(shape)
    generator = torch.Generator().manual_seed(0)
    weights = {t.name: torch.randn(t.shape, generator=generator).bfloat16() * 0.05 for t in staged_bed.SHAPE.tensors()}
    rounds = 1 if quick else 5
    rows: Rows = {}
    for transport in transports:
        rows |= {f"{size} {way}": row for way, row in _pushes(weights, transport, rounds).items()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    seconds = _broadcast(nbytes, rounds)
    rows[f"{size} broadcast"] = {
        "gib": nbytes / 2**30,
        "sent": 1.0,
        "total_s": seconds,
        "total_s_per_gib": seconds * 2**30 / nbytes,
    }
    return rows


def _pushes(weights: dict[str, torch.Tensor], transport: Literal["shm", "tcp"], rounds: int) -> Rows:
    rows: Rows = {}
    engine = staged_bed.BedEngine(dtype=torch.bfloat16)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    gib = nbytes / 2**30
    version = 0
    for kind in ("full", "delta"):
        config = PushConfig(way="staged", transport=transport, delta="fast" if kind == "delta" else "off")
        with Pusher([engine.url], config=config) as pusher:
            version += 1
            pusher.push(staged_bed.shards(weights), version=version)  # attaches, plans, maps memory, makes the base
            seen: list[dict[str, float]] = []
            for _ in range(rounds):
                change(weights, seed=version)
                version += 1
                report = pusher.push(staged_bed.shards(weights), version=version)
                (outcome,) = report.engines
                assert outcome.kind == kind, outcome.reason
                seen.append(
                    {
                        "gib": gib,
                        "sent": outcome.bytes / nbytes,
                        "total_s": report.total_seconds,
                        "write_s": outcome.seconds["write"],
                        "verify_s": outcome.seconds["verify"],
                        "pause_s": outcome.pause_seconds,
                        "commit_cpu_s": engine.load_cpu_s,
                        "total_s_per_gib": report.total_seconds / gib,
                        "commit_cpu_s_per_gib": engine.load_cpu_s / gib,
                    }
                )
        rows[f"{kind} {transport}"] = {key: statistics.median(row[key] for row in seen) for key in seen[0]}
    engine.stop()
    return rows


def change(weights: dict[str, torch.Tensor], *, seed: int) -> None:
    """One step, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        count = max(1, int(bits.numel() * CHANGED))
        index = torch.randint(bits.numel(), (count,), generator=generator).unique()
        bits[index] += torch.randint(0, 2, index.shape, generator=generator).to(torch.int16) * 2 - 1


def _broadcast(nbytes: int, rounds: int) -> float:
    """Median seconds of a broadcast to one other process."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        other = context.Process(target=_take_part, args=(1, folder, nbytes, rounds))
        other.start()
        seconds = _take_part(0, folder, nbytes, rounds)
        other.join()
    return statistics.median(seconds)


def _take_part(rank: int, folder: str, nbytes: int, rounds: int) -> list[float]:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    data = torch.zeros(nbytes, dtype=torch.uint8)
    seconds: list[float] = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(data, src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return seconds[1:]
