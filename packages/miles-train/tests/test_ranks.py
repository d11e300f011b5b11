"""Two gloo ranks do what one does, to rounding; what would hang fails instead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(240)

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.fixture(scope="module")
def runs(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders that one rank, and two ranks, left behind."""
    folders = {ranks: tmp_path_factory.mktemp(f"ranks-{ranks}") for ranks in (1, 2)}
    command = [sys.executable, "-W", "error::UserWarning", str(WORKER), str(qwen3), *map(str, folders.values())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, stderr = process.communicate(timeout=200)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks are its children
    assert process.returncode == 0, stderr[-3000:]
    return folders


def report(folder: Path, rank: int = 0, part: str = "run") -> dict[str, Any]:
    return json.loads((folder / f"{part}-{rank}.json").read_text())


def assembled(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Whole weights from the shards of all ranks, which must tile each of them exactly once."""
    whole: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for part in sorted(folder.glob(f"{name}-*.pt")):
        for key, shape, dtype, box, tensor in torch.load(part):
            assert dtype == str(tensor.dtype).removeprefix("torch.")
            place = tuple(slice(start, stop) for start, stop in box)
            whole.setdefault(key, torch.zeros(shape, dtype=tensor.dtype))[place] = tensor
            written.setdefault(key, torch.zeros(shape))[place] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_two_ranks_train_as_one_does(runs, name):
    one, two = report(runs[1])[name], report(runs[2])[name]
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        same = a.keys() - {"trainer/step_seconds", "batch/tokens", "batch/micro_batches"}
        for metric in same:
            assert a[metric] == pytest.approx(b[metric], rel=1e-4, abs=1e-6), metric
    assert_close(assembled(runs[1], name), assembled(runs[2], name), atol=2e-5)


def test_both_ranks_report_the_same(runs):
    first, second = report(runs[2], 0), report(runs[2], 1)
    for name in ("plain", "everything"):
        for a, b in zip(first[name], second[name], strict=True):
            assert {k: v for k, v in a.items() if "seconds" not in k} == {
                k: v for k, v in b.items() if "seconds" not in k
            }


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_put_together_are_the_exported_model(runs, ranks):
    lm = AutoModelForCausalLM.from_pretrained(runs[ranks] / "hf", dtype="auto")
    assert_close(assembled(runs[ranks], "plain"), {n: p.detach() for n, p in lm.named_parameters()}, atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_processes_go_on_from_a_checkpoint_bit_for_bit(runs, ranks):
    """Faults D06, D07: weights, moments, learning rate, version and random states are those of an unbroken run.

    The checkpoint was written while the unbroken run trained its next steps.
    """
    for rank in range(ranks):
        unbroken, resumed = report(runs[ranks], rank), report(runs[ranks], rank, "resume")
        assert resumed["resumed version"] == unbroken["continued version"] == 4
        assert resumed["resumed draws"] == unbroken["continued draws"]
        for a, b in zip(unbroken["continued"], resumed["resumed"], strict=True):
            assert {k: v for k, v in a.items() if "seconds" not in k} == {
                k: v for k, v in b.items() if "seconds" not in k
            }
    assert_close(assembled(runs[ranks], "resumed"), assembled(runs[ranks], "continued"), atol=0)
    rates = [step["optimizer/lr"] for name in ("plain", "continued") for step in report(runs[ranks])[name]]
    assert len(set(rates)) == 4, "the schedule moves, so that a wrong position would show"


def test_one_rank_goes_on_from_the_checkpoint_of_two(runs):
    assert report(runs[2], 0, "regroup")["regrouped version"] == 4
    (whole,) = runs[2].glob("loaded-*.pt")
    assert whole.name == "loaded-0.pt", "a single rank holds everything"
    assert_close(assembled(runs[2], "loaded"), assembled(runs[2], "plain"), atol=0)
    assert_close(assembled(runs[2], "regrouped"), assembled(runs[2], "continued"), atol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_killed_while_it_writes_leaves_the_old_checkpoint_alone(runs, ranks):
    """Fault D11. Three times, early and late in the file; what is left of it does not disturb the next try."""
    manifest = json.loads((runs[ranks] / "checkpoint" / "trainer.json").read_text())
    assert manifest["version"] == 2, "the one that was being written had version 99"
    sizes = {name: (runs[ranks] / "checkpoint" / name).stat().st_size for name in manifest["files"]}
    assert sizes == manifest["files"]
    assert len(sizes) == ranks


def test_the_ranks_that_survive_are_told_instead_of_waiting(runs):
    assert "could not be written" in report(runs[2], 0, "die")["bereaved"]


def test_sixteen_bit_training_keeps_float32_masters_and_sends_sixteen_bit_shards(runs):
    one, two = assembled(runs[1], "mixed"), assembled(runs[2], "mixed")
    assert {tensor.dtype for tensor in two.values()} == {torch.bfloat16}
    assert_close(one, two, atol=0.02)


def test_unequal_micro_batch_counts_are_refused_on_every_rank_with_the_numbers(runs):
    """Fault A13."""
    for rank in (0, 1):
        assert "Numbers of micro-batches" in report(runs[2], rank)["unequal"]
        assert "rank 0: [2]; rank 1: [1]" in report(runs[2], rank)["unequal"]


def test_a_rank_that_never_comes_is_an_error_and_not_a_hang(runs):
    """Fault A13."""
    assert "trained" not in report(runs[2], 0)["watchdog"]
    assert report(runs[2], 1)["watchdog"] == "stayed away"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_uneven_and_empty_blocks_are_cut_where_fsdp_cuts_them(rank, tmp_path, monkeypatch):
    """Three ranks share rows of 10, 4 and 67: the last rank has 2, none, and 21."""
    import torch.distributed as dist
    from miles_train import TrainConfig
    from miles_train.fsdp import FSDPTrainer
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"vocab_size": 67, "hidden_size": 10, "intermediate_size": 9, "num_hidden_layers": 1, "head_dim": 4}
    lm = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True))
    lm.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it for the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        trainer = FSDPTrainer(tmp_path, rank=rank)
        trainer.setup(TrainConfig(ranks=3, device="cpu"))
        got = {shard.name: shard for shard in trainer.shards()}
    finally:
        dist.destroy_process_group()
    whole = dict(lm.named_parameters())
    for name, parameter in whole.items():
        chunks = parameter.detach().chunk(3)
        if rank >= len(chunks):
            assert name not in got
            continue
        start = sum(len(chunk) for chunk in chunks[:rank])
        assert got[name].box == (
            (start, start + len(chunks[rank])),
            *((0, size) for size in parameter.shape[1:]),
        )
        assert torch.equal(got[name].tensor, chunks[rank])
    assert ("model.layers.0.self_attn.q_norm.weight" in got) == (rank < 2)
