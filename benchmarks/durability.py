"""What it costs that a run survives: spool and ledger for each sample, the pause of a checkpoint, and coming back.

    python benchmarks/durability.py                    all parts, two to three minutes on two quiet cores
    python benchmarks/durability.py records            one part: records, checkpoint, resume
    python benchmarks/durability.py --json             the same numbers as JSON

records     The real buffer, producer, loop, spool and ledger around parts that take no time: groups of 8 episodes of
            `--tokens` tokens. The same loop runs bare, with the spool, and with spool and ledger. An episode of a real
            run takes seconds, so what counts is milliseconds for each sample. The ledger's size is measured too.
checkpoint  A real trainer rank with a random model of `--parameters` million parameters takes optimizer steps of
            `--step-tokens` tokens; some of them with a checkpoint behind them. The pause is the time that `begin_save`
            holds training up; the rest is written beside the next step, whose slowdown is shown. The target is a pause
            of at most 5 % of a step, generation and weight update not even counted in the step. Pause and step both
            grow with the model, so their ratio depends on the tokens of a step alone.
resume      From a directory that 100 steps left behind, in a new process: opening the ledger, adopting what the spool
            alone has, taking up every open group, loading the state. Loading the model and starting engines, which a
            fresh run does as well, are left out. The target is 10 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from miles_core.batching import Trained
from miles_core.durable.checkpoints import Checkpoints
from miles_core.durable.ledger import Ledger
from miles_core.durable.spool import SpoolWriter
from miles_core.monitor import JsonlMonitor
from miles_core.run import loop
from miles_core.run.resume_state import resume_state
from miles_rollout import GroupBuffer, GroupRequest, PromptStream, RolloutConfig, produce
from miles_tito import Episode, Group, Outcome, Prompt, Trajectory, VersionSpan
from miles_tito.records.summary import GroupRef, summarize

ROLLOUT = RolloutConfig(group_size=8, groups_per_step=16, max_staleness=1, filter="no_filter")
PROMPTS = [Prompt(id=f"prompt-{i}", messages=({"role": "user", "content": f"problem {i}"},)) for i in range(5000)]
SAMPLES_A_STEP = ROLLOUT.group_size * ROLLOUT.groups_per_step

Numbers = dict[str, float]


class Instant:
    """A worker that answers at once, and durably where there is a spool."""

    def __init__(self, tokens: int, spool: SpoolWriter | None) -> None:
        rng = np.random.default_rng(0)
        self._spool = spool
        self._disk = ThreadPoolExecutor(1)
        self._ids = [rng.integers(0, 150_000, tokens).astype(np.int32) for _ in range(64)]
        self._logprobs = [-rng.exponential(0.4, tokens).astype(np.float32) for _ in range(64)]
        self._count = 0

    async def __call__(self, request: GroupRequest) -> GroupRef:
        group = Group(
            id=request.group_id,
            prompt_id=request.prompt.id,
            episodes=tuple(self._episode(request, index) for index in range(request.group_size)),
        )
        if self._spool is None:
            await asyncio.sleep(0)
            return summarize(group)
        address = await asyncio.get_running_loop().run_in_executor(self._disk, self._spool.append, group)
        ref = summarize(group)
        return replace(ref, metadata={**ref.metadata, "spool": (address.file, address.offset)})

    def _episode(self, request: GroupRequest, index: int) -> Episode:
        self._count += 1
        tokens, logprobs = self._ids[self._count % 64], self._logprobs[self._count % 64]
        mask = np.arange(len(tokens)) >= len(tokens) // 4
        return Episode(
            id=f"{request.group_id}/{index}",
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            attempt=request.attempt,
            outcome=Outcome.GRADED,
            reward=float(index % 2),
            trajectories=(
                Trajectory(
                    id=f"{request.group_id}/{index}.0",
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.where(mask, logprobs, 0),
                    versions=(VersionSpan(start=len(tokens) // 4, end=len(tokens), version=0),),
                ),
            ),
        )


class Weightless:
    """A trainer whose steps take no time."""

    def __init__(self) -> None:
        self.version = 0

    async def train(self, groups: Any) -> Trained:
        self.version += 1
        return Trained(version=self.version, metrics={"batch/episodes": float(SAMPLES_A_STEP)})


async def run_loop(folder: Path, *, steps: int, tokens: int, spooled: bool, ledger: Ledger | None) -> float:
    """Seconds of `steps` steps."""
    spool = SpoolWriter(folder / "trajectories", "worker-0") if spooled else None
    buffer = GroupBuffer(replace(ROLLOUT, take_policy="keep", put_policy="keep"), observer=ledger)

    async def finished(ref: GroupRef) -> None:
        if ledger is not None:
            ledger.finished(ref)

    began = time.perf_counter()
    await loop.run(
        produce=partial(
            produce,
            prompts=PromptStream(PROMPTS),
            buffer=buffer,
            run_group=Instant(tokens, spool),
            group_size=ROLLOUT.group_size,
            spool=finished,
        ),
        buffer=buffer,
        train=Weightless().train,
        push=None,
        monitor=JsonlMonitor(folder),
        steps=steps,
        on_step=loop.nothing_more,
    )
    seconds = time.perf_counter() - began
    if spool is not None:
        spool.close()
    return seconds


def records(*, steps: int, tokens: int) -> Numbers:
    """Milliseconds for each sample of spool and ledger, and their sizes."""
    seconds: dict[str, list[float]] = {}
    sizes: Numbers = {}
    for _ in range(3):  # interleaved, so that a busy moment of the machine meets all of them
        for kind in ("bare", "spool", "both"):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
                folder, ledger = Path(name), None
                if kind == "both":
                    ledger = Ledger.open(folder / "ledger.db", create=True)
                    ledger.start()
                taken = asyncio.run(run_loop(folder, steps=steps, tokens=tokens, spooled=kind != "bare", ledger=ledger))
                seconds.setdefault(kind, []).append(taken)
                if ledger is not None:
                    issued = ledger.counts().issued * ROLLOUT.group_size
                    ledger.close()
                    sizes = {
                        "ledger_gb_per_million_samples": (folder / "ledger.db").stat().st_size / issued / 1e3,
                        "spool_bytes_per_token": _size(folder / "trajectories") / issued / tokens,
                    }
    best = {kind: min(values) * 1e3 / (steps * SAMPLES_A_STEP) for kind, values in seconds.items()}
    return {
        "loop_ms_per_sample": best["bare"],
        "spool_ms_per_sample": best["spool"] - best["bare"],
        "ledger_ms_per_sample": best["both"] - best["spool"],
        **sizes,
    }


def checkpoint(*, parameters: float, step_tokens: int, threads: int) -> Numbers:
    """Step time, pause and slowdown in seconds."""
    from miles_train import LossConfig, OptimizerConfig, TrainConfig, batches_of, sft_sample
    from miles_train.fsdp import FSDPTrainer

    config = TrainConfig(
        device="cpu",
        threads=threads,
        token_budget=step_tokens,
        optimizer=OptimizerConfig(lr=1e-4),
        loss=LossConfig(kind="sft", normalization="token", log_entropy=False),
    )
    rng = np.random.default_rng(0)
    samples = [
        sft_sample(f"s{i}", rng.integers(0, 1000, step_tokens // 4).tolist(), np.arange(step_tokens // 4) > 8)
        for i in range(4)
    ]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        trainer = FSDPTrainer(_model(Path(name) / "model", parameters * 1e6))
        layout = trainer.setup(config)
        batches = batches_of(samples, config)

        def timed(act: Callable[[], object]) -> float:
            began = time.perf_counter()
            act()
            return time.perf_counter() - began

        def step() -> float:
            return timed(lambda: trainer.train(batches))

        step()
        first_pause = timed(lambda: trainer.begin_save(Path(name) / "first"))  # allocates the host copy
        trainer.finish_save()
        plain = [step() for _ in range(4)]
        pauses: list[float] = []
        beside: list[float] = []
        waits: list[float] = []
        for index in range(3):
            pauses.append(timed(lambda index=index: trainer.begin_save(Path(name) / f"beside-{index}")))
            beside.append(step())
            waits.append(timed(trainer.finish_save))
        whole = timed(lambda: trainer.save(Path(name) / "whole"))
        size = _size(Path(name) / "whole")
        load = timed(lambda: trainer.load(Path(name) / "whole"))
        trainer.close()
    usual, pause = statistics.median(plain), statistics.median(pauses)
    return {
        "million_parameters": layout.num_parameters / 1e6,
        "checkpoint_mb": size / 1e6,
        "step_s": usual,
        "pause_s": pause,
        "pause_share_of_step": pause / usual,
        "first_pause_s": first_pause,
        "step_beside_writing_s": statistics.median(beside),
        "wait_after_that_step_s": statistics.median(waits),
        "synchronous_save_s": whole,
        "load_s": load,
    }


def resume(*, steps: int, tokens: int) -> Numbers:
    """Seconds until a new process has everything that the first run of the loop left, model and engines aside."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        ledger = Ledger.open(folder / "ledger.db", create=True)
        ledger.start()
        asyncio.run(run_loop(folder, steps=steps, tokens=tokens, spooled=True, ledger=ledger))
        checkpoints = Checkpoints(folder / "checkpoints")
        (checkpoints.begin(steps - 1) / "trainer").mkdir()
        ledger.commit(steps - 1, checkpoints.complete(steps - 1, {"drawn": ledger.drawn()}).name)
        ledger.close()
        command = [sys.executable, __file__, "resume", "--in", name]
        took = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
        return {"samples_before": float(steps * SAMPLES_A_STEP), **took}


def take_up_again(folder: Path) -> Numbers:
    """In the new process."""
    began = time.perf_counter()
    checkpoints = Checkpoints(folder / "checkpoints")
    found = checkpoints.latest()
    assert found is not None, "the first process wrote one"
    checkpoints.load_state(found)
    ledger = Ledger.open(folder / "ledger.db")
    ledger.recover_spooled(folder / "trajectories")
    ledger.start(found.step)
    ledger_s = time.perf_counter() - began
    taken = resume_state(ledger, trajectories=folder / "trajectories", prompts=PROMPTS)
    buffer = GroupBuffer(ROLLOUT, observer=ledger, version=found.step)
    buffer.restore(taken)
    ledger.close()
    return {"groups": float(len(taken.groups)), "ledger_s": ledger_s, "resume_s": time.perf_counter() - began}


def _model(path: Path, parameters: float) -> Path:
    """A random Llama of about that many parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    hidden = max(int((parameters / 8 / 12) ** 0.5) // 64 * 64, 64)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries warn on stdout and stderr while they are imported."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(null)
        os.close(saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["records", "checkpoint", "resume"])
    parser.add_argument("--steps", type=int, default=50, help="steps of the loop")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an episode")
    parser.add_argument("--parameters", type=float, default=10.0, help="millions, of the model that is saved")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of an optimizer step")
    parser.add_argument("--threads", type=int, default=2, help="of the trainer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        print(json.dumps(take_up_again(options.folder)))
        return
    parts: dict[str, Callable[[], Numbers]] = {
        "records": lambda: records(steps=options.steps, tokens=options.tokens),
        "checkpoint": lambda: checkpoint(
            parameters=options.parameters, step_tokens=options.step_tokens, threads=options.threads
        ),
        "resume": lambda: resume(steps=2 * options.steps, tokens=options.tokens),
    }
    results: dict[str, Numbers] = {}
    for name, measure in parts.items():
        if options.part in (None, name):
            with quiet():
                results[name] = measure()
            if not options.json:
                print(f"\n{name}")
                for key, value in results[name].items():
                    print(f"  {key:32} {value:12,.4f}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
