"""Every way of pushing, into one real SGLang server that goes on generating: SmolLM2-135M's shape in bfloat16 on a CPU.

`gap_s` is the longest time that a running request waited for its next token during a push, `token_s` what it waits
otherwise. `tensor` and `disk` are SGLang's own update endpoints (`unverified`: as SGLang has them, without checksums);
`staged` is the receiver inside the engine, which always verifies. A step changes 1.6 % of the values by one unit in the
last place. Ways take turns, so that a busy machine is busy for all; figures are medians, `of_tensor` that of the ratios
to a verified `tensor` push of the same round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import torch
from miles_rollout.engines import EngineConfig, EngineServer
from miles_weightsync import PushConfig, Shard
from miles_weightsync.config import LOADER
from miles_weightsync.push import Pusher
from weightsync_commit import SIZES, SMOLLM2, change

Rows = dict[str, dict[str, float]]


def measure(*, quick: bool = False) -> Rows:
    """Rows by way."""
    rounds, layers = (1, 2) if quick else (5, 30)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as held:
        folder = Path(scratch) / "model"
        weights = _save(folder, layers=layers)
        url = held.enter_context(_server(folder, Path(scratch) / "engine.log"))
        ways = {
            "tensor": PushConfig(),
            "tensor unverified": PushConfig(verify="none"),
            "disk": PushConfig(way="disk", disk_dir=f"{scratch}/versions", disk_template=str(folder)),
            "staged full shm": PushConfig(way="staged", delta="off"),
            "staged full tcp": PushConfig(way="staged", delta="off", transport="tcp"),
            "staged delta": PushConfig(way="staged", delta="fast"),
        }
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        version = 0
        for number in range(rounds + 1):
            for name, config in ways.items():
                # One pusher at a time: the engine answers to the sender that attached last.
                with Pusher([url], config=config) as pusher:
                    if config.way == "staged":  # attach, plan, map memory, make the base of deltas
                        version += 1
                        pusher.push(_shards(weights), version=version)
                    change(weights, seed=version)
                    version += 1
                    row = _push(pusher, url, weights, version)
                if number:  # the first round warms up
                    seen[name].append(row)
    tensor = [row["total_s"] for row in seen["tensor"]]
    for rows in seen.values():
        for row, total in zip(rows, tensor, strict=True):
            row["of_tensor"] = row["total_s"] / total
    return {
        name: {column: statistics.median(row[column] for row in rows) for column in rows[0]}
        for name, rows in seen.items()
    }


def _push(pusher: Pusher, url: str, weights: dict[str, torch.Tensor], version: int) -> dict[str, float]:
    """One push beside one request."""
    gib = sum(tensor.nbytes for tensor in weights.values()) / 2**30
    with _tokens(url) as arrivals:
        begin = time.monotonic()
        report = pusher.push(_shards(weights), version=version)
        _wait(arrivals, len(arrivals) + 3)
    waits = [(end, end - start) for start, end in pairwise(arrivals)]
    (outcome,) = report.engines
    return {
        "sent": (outcome.bytes or report.bytes) / (gib * 2**30),
        "total_s": report.total_seconds,
        "pause_s": report.pause_seconds,
        "gap_s": max(wait for end, wait in waits if end > begin),
        "token_s": statistics.median(wait for end, wait in waits if end <= begin),
        "pause_s_per_gib": report.pause_seconds / gib,
    }


@contextmanager
def _tokens(url: str) -> Iterator[list[float]]:
    """When each token of a long request arrived; the request ends with the block."""
    arrivals: list[float] = []
    rid = f"r{time.monotonic_ns()}"
    command = [sys.executable, str(Path(__file__).with_name("token_times.py")), url, rid]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        thread = threading.Thread(target=_note, args=(process, arrivals))
        thread.start()
        try:
            _wait(arrivals, 12)
            yield arrivals
        finally:
            httpx.post(f"{url}/abort_request", json={"rid": rid}, timeout=30, trust_env=False)
            thread.join()


def _note(process: subprocess.Popen[str], arrivals: list[float]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        arrivals.append(float(line))


def _wait(arrivals: list[float], count: int) -> None:
    deadline = time.monotonic() + 120
    while len(arrivals) < count:
        assert time.monotonic() < deadline, f"{len(arrivals)} of {count} tokens came within 120 s"
        time.sleep(0.002)


def _shards(weights: dict[str, torch.Tensor]) -> Iterator[Shard]:
    for name, tensor in weights.items():
        box = tuple((0, n) for n in tensor.shape)
        yield Shard(name, tuple(tensor.shape), tensor.dtype, box, tensor)


def _save(folder: Path, *, layers: int) -> dict[str, torch.Tensor]:
    """A random model, on disk and as tensors by their names there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {k: v for k, v in {**SMOLLM2, **SIZES["135M"]}.items() if k not in ("architectures", "dtype")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, "num_hidden_layers": layers})).bfloat16()
    model.save_pretrained(folder)
    return {name: p.data for name, p in model.named_parameters() if name != "lm_head.weight"}


@contextmanager
def _server(folder: Path, log: Path) -> Iterator[str]:
    options = {"skip-tokenizer-init": True, "custom-weight-loader": [LOADER]}
    config = EngineConfig(device="cpu", dtype="bfloat16", max_total_tokens=4096, options=options)
    with EngineServer(config, model_path=folder, log_path=log) as server:
        yield server.url
