"""One rank: a checkpoint holds the moment it was begun at, and is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_train import CheckpointError, OptimizerConfig, TrainConfig, batches_of
from miles_train.checkpoint import block_file, writer
from miles_train.fsdp import FSDPTrainer
from safetensors.torch import load_file

SETTINGS = TrainConfig(device="cpu", threads=1, token_budget=64, optimizer=OptimizerConfig(lr=1e-2))


@pytest.fixture
def trainer(qwen3: Path) -> Iterator[FSDPTrainer]:
    made = FSDPTrainer(qwen3)
    made.setup(SETTINGS)
    yield made
    made.close()


@pytest.fixture
def batches(sample):
    return batches_of([sample("a", 12), sample("b", 9, seed=1)], SETTINGS)


def weights(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.shards()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Gate:
    """Holds the writer up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open, write = threading.Event(), threading.Event(), block_file._write

        def wait(descriptor: int, data: memoryview) -> None:
            self.reached.set()
            assert self._open.wait(30)
            write(descriptor, data)

        monkeypatch.setattr(block_file, "_write", wait)

    def open(self) -> None:
        self._open.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(trainer, batches, tmp_path, monkeypatch):
    trainer.train(batches)
    at_begin, gate = weights(trainer), Gate(monkeypatch)
    trainer.begin_save(tmp_path / "one")
    assert gate.reached.wait(30)
    trainer.train(batches)
    assert not (tmp_path / "one").exists(), "it appears only when it is complete"
    gate.open()
    trainer.finish_save()
    assert not same(weights(trainer), at_begin)
    trainer.load(tmp_path / "one")
    assert same(weights(trainer), at_begin)
    assert trainer.version == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_two_checkpoints_are_never_written_at_once(trainer, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    trainer.begin_save(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"one is still open; call finish_save\(\)"):
        trainer.begin_save(tmp_path / "two")
    gate.open()
    trainer.finish_save()
    trainer.save(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_finishing_what_was_never_begun_does_nothing(trainer):
    trainer.finish_save()


def test_closing_lets_a_checkpoint_be_written_to_its_end(trainer, tmp_path):
    trainer.begin_save(tmp_path / "one")
    trainer.close()
    assert json.loads((tmp_path / "one" / "trainer.json").read_text())["version"] == 0


def test_a_checkpoint_is_replaced_whole(trainer, batches, tmp_path):
    (tmp_path / "at.partial").mkdir()
    (tmp_path / "at.partial" / "rank-7.safetensors").write_text("left by a run that died")
    trainer.save(tmp_path / "at")
    trainer.train(batches)
    trainer.save(tmp_path / "at")
    manifest = json.loads((tmp_path / "at" / "trainer.json").read_text())
    assert manifest["version"] == manifest["optimizer_steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["at"]
    assert {path.name for path in (tmp_path / "at").iterdir()} == {"trainer.json", "rank-0.safetensors"}


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_sixteen_bit_training_goes_on_bit_for_bit(qwen3, batches, tmp_path, master):
    """With float32 masters a single rank is sharded as well; with sixteen-bit ones the moments are of that type."""
    settings = replace(SETTINGS, dtype="bfloat16", master_dtype=master)
    trained: list[dict[str, torch.Tensor]] = []
    for is_first in (True, False):
        trainer = FSDPTrainer(qwen3)
        trainer.setup(settings)
        if is_first:
            trainer.train(batches)
            trainer.save(tmp_path / "one")
        else:
            trainer.load(tmp_path / "one")
        trainer.train(batches)
        trained.append(weights(trainer))
        trainer.close()
    assert same(*trained)


def test_any_safetensors_reader_opens_it(trainer, tmp_path):
    trainer.save(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "rank-0.safetensors")
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensors[f"model.{name}"], tensor)


def test_one_of_another_model_is_refused_with_the_names(trainer, llama, tmp_path):
    trainer.save(tmp_path / "at")
    other = FSDPTrainer(llama)
    other.setup(SETTINGS)
    with pytest.raises(CheckpointError, match="of another model: it lacks"):
        other.load(tmp_path / "at")


@pytest.mark.parametrize("damage", ["manifest", "torn manifest", "file", "short file"])
def test_an_incomplete_one_is_refused_before_anything_is_changed(trainer, batches, tmp_path, damage):
    trainer.save(tmp_path / "at")
    trainer.train(batches)
    before = weights(trainer)
    manifest, file = tmp_path / "at" / "trainer.json", tmp_path / "at" / "rank-0.safetensors"
    match damage:
        case "manifest":
            manifest.unlink()
        case "torn manifest":
            os.truncate(manifest, 20)
        case "file":
            file.unlink()
        case "short file":
            os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"is incomplete: .* Load an older one"):
        trainer.load(tmp_path / "at")
    assert same(weights(trainer), before)
    assert trainer.version == 1


def test_what_is_not_there_is_named(trainer, tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*nowhere"):
        trainer.load(tmp_path / "nowhere")


def test_a_newer_format_is_refused(trainer, tmp_path):
    trainer.save(tmp_path / "at")
    manifest = tmp_path / "at" / "trainer.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version of miles-train reads format 1"):
        trainer.load(tmp_path / "at")


def test_a_disk_too_small_is_an_error_with_numbers_before_a_byte_is_written(trainer, tmp_path, monkeypatch):
    class Usage:
        free = 1000

    trainer.save(tmp_path / "at")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"[\d,]{7,} bytes are needed and 1,000 are free.*before are untouched"):
        trainer.save(tmp_path / "next")
    assert [path.name for path in tmp_path.iterdir()] == ["at"]


def test_a_disk_that_fills_up_in_the_middle_keeps_the_old_one_and_leaves_nothing(
    trainer, batches, tmp_path, monkeypatch
):
    write, calls = block_file._write, 0

    def full(descriptor: int, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data)

    trainer.save(tmp_path / "at")
    before = weights(trainer)
    trainer.train(batches)
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "_write", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*bytes free"):
            trainer.save(tmp_path / "at")
    assert [path.name for path in tmp_path.iterdir()] == ["at"]
    trainer.save(tmp_path / "next")  # space was freed: training and saving go on
    trainer.load(tmp_path / "at")
    assert same(weights(trainer), before)
