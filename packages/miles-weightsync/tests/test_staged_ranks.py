"""Two trainer ranks on gloo: FSDP2's DTensors and Megatron's blocks reach engines of one and of two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import staged_bed
import torch
from installed import skip_unless_installed
from staged_bed import BedEngine, checkpoint, digests
from staged_trainer import Trainer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def engines() -> Iterator[list[BedEngine]]:
    made = [BedEngine(tp=1), BedEngine(tp=2)]
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Trainer]]:
    """The ranks, which take seconds to start: others when one has died."""
    folder = tmp_path_factory.mktemp("weights")
    (folder / "config.json").write_text(json.dumps(staged_bed.CONFIG))
    for version in (1, 2, 3):
        torch.save(checkpoint(1, steps=version - 1), folder / f"v{version}.pt")
    started: list[Trainer] = []

    def get() -> Trainer:
        if not started or not started[-1].is_alive:
            started.append(Trainer(folder, store=f"store{len(started)}"))
            started[-1].wait_until_ready()
        return started[-1]

    yield get
    for trainer in started:
        trainer.close()


def serve(engines: list[BedEngine], version: int) -> bool:
    found = [engine.generate() for engine in engines]
    return all(
        answer is not None
        and answer["digests"] == digests(1, engine.tp, steps=version - 1)
        and answer["version"] == str(version)
        for engine, answer in zip(engines, found, strict=True)
    )


@pytest.mark.parametrize(
    ("source", "transport"), [("fsdp2", "shm"), ("megatron", "tcp"), ("fsdp2", "mooncake"), ("megatron", "nixl")]
)
def test_shards_of_two_ranks_become_whole_engines(
    trainers: Callable[[], Trainer], engines: list[BedEngine], source: str, transport: str
) -> None:
    skip_unless_installed(transport)
    trainer, urls = trainers(), [engine.url for engine in engines]
    for version, kind in ((1, "full"), (2, "delta")):
        done = trainer.push(source, transport, version, urls, verify=True)
        assert (done["error"], done["equal"]) == (None, [True, True])
        assert [engine["kind"] for engine in done["engines"]] == [kind, kind]
        assert serve(engines, version)


def test_a_death_among_the_ranks_changes_no_engine(trainers: Callable[[], Trainer], engines: list[BedEngine]) -> None:
    trainer, urls = trainers(), [engine.url for engine in engines]
    assert trainer.push("megatron", "tcp", 2, urls)["error"] is None
    done = trainer.push("megatron", "tcp", 3, urls, dies=True)
    assert "trainer rank 1 is gone" in done["error"] or "lost the other 1 trainer ranks" in done["error"]
    assert serve(engines, 2)
