"""Two trainer ranks on gloo: FSDP2's DTensors and Megatron's blocks reach engines of one and of two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import staged_bed
import torch
from staged_bed import BedEngine, checkpoint, digests
from staged_trainer import Trainer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def engines() -> Iterator[list[BedEngine]]:
    made = [BedEngine(tp=1), BedEngine(tp=2)]
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    (tmp_path / "config.json").write_text(json.dumps(staged_bed.CONFIG))
    for version in (1, 2, 3):
        torch.save(checkpoint(1, steps=version - 1), tmp_path / f"v{version}.pt")
    ranks = Trainer(tmp_path)
    ranks.wait_until_ready()
    yield ranks
    ranks.close()


def serve(engines: list[BedEngine], version: int) -> bool:
    found = [engine.generate() for engine in engines]
    return all(
        answer is not None
        and answer["digests"] == digests(1, engine.tp, steps=version - 1)
        and answer["version"] == str(version)
        for engine, answer in zip(engines, found, strict=True)
    )


def test_shards_of_two_ranks_become_whole_engines_and_a_death_among_them_changes_none(
    trainer: Trainer, engines: list[BedEngine]
) -> None:
    urls = [engine.url for engine in engines]
    for source, transport in (("fsdp2", "shm"), ("megatron", "tcp")):
        for version, kind in ((1, "full"), (2, "delta")):
            done = trainer.push(source, transport, version, urls, verify=True)
            assert (done["error"], done["equal"]) == (None, [True, True])
            assert [engine["kind"] for engine in done["engines"]] == [kind, kind]
            assert serve(engines, version)
    done = trainer.push("megatron", "tcp", 3, urls, dies=True)
    assert "trainer rank 1 is gone" in done["error"] or "lost the other 1 trainer ranks" in done["error"]
    assert serve(engines, 2)
