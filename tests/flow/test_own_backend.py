"""The whole loop with a trainer backend of the user's own: one file, and two lines of the configuration.

Its four ranks stand for two replicas of two ranks each, as tensor or pipeline parallel ones do: each two share a data
rank, and it asks for an even number of micro-batches.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS, STEPS, BATCH = 4, 5, 7

BACKEND = '''
import json
from pathlib import Path

from miles_train import Layout, StepResult


class Replicas:
    """Implements `miles_train.Trainer`: it writes down what it is given to train."""

    def __init__(self, model_path, *, rank, init_method, log, peers):
        self._rank, self._peers, self._log, self._version = rank, peers, Path(log), 0

    def setup(self, config, prepare_model=None):
        return Layout(
            rank=self._rank,
            ranks=config.ranks,
            data_rank=self._rank // self._peers,
            data_ranks=config.ranks // self._peers,
            micro_batch_multiple=2,
            device="cpu",
            num_parameters=0,
            vocab_size=448,
        )

    def train(self, batches):
        self._version += 1
        with (self._log / f"rank-{self._rank}.jsonl").open("a") as file:
            for batch in batches:
                rows = [
                    [[name, hash_of(m, i)] for i, name in enumerate(m.sample_ids) if m.weights.any()]
                    for m in batch.micro_batches
                ]
                step = {"version": self._version, "rows": rows, "loss_tokens": batch.totals.num_loss_tokens}
                file.write(json.dumps(step) + "\\n")
        return StepResult(version=self._version, metrics={"loss/total": 1.0 / self._version})

    def begin_save(self, path):
        if self._rank == 0:
            Path(path).mkdir(parents=True)
            (Path(path) / "version").write_text(str(self._version))

    def finish_save(self):
        pass

    def load(self, path):
        self._version = int((Path(path) / "version").read_text())

    def export_hf(self, path):
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / f"rank-{self._rank}").write_text(str(self._version))

    def close(self):
        pass


def hash_of(m, row):
    return m.tokens[m.cu_seqlens[row] : m.cu_seqlens[row + 1]].tobytes().hex()
'''

CONFIG = """
[run]
name = "own"
[model]
path = "{model}"
[train]
backend = "replicas:Replicas"
backend_args = {{ log = "{log}", peers = 2 }}
ranks = 4
device = "cpu"
token_budget = 60
[sft]
steps = 5
batch_size = 7
data = "miles_envs.tasks.arithmetic:sft_conversations"
data_args = {{ seed = 0, n = 40 }}
[ray]
object_store_bytes = 100_000_000
[monitor]
console = "off"
"""


def test_ranks_that_share_a_data_rank_get_the_same_rows_and_nothing_is_trained_twice(tmp_path: Path, model: Path):
    from miles_command import Command

    (tmp_path / "replicas.py").write_text(BACKEND)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, log=tmp_path))
    status, output = Command(tmp_path, "sft", "@", "run.toml").end(200.0)
    assert status == 0, output

    steps_R = [steps_of(tmp_path / f"rank-{rank}.jsonl") for rank in range(RANKS)]
    assert steps_R[0] == steps_R[1]
    assert steps_R[2] == steps_R[3]
    assert [step["version"] for step in steps_R[0]] == list(range(1, STEPS + 1))
    counts: list[int] = []
    for one, other in zip(steps_R[0], steps_R[2], strict=True):
        assert len(one["rows"]) == len(other["rows"]), "a rank would wait for ever"
        assert len(one["rows"]) % 2 == 0
        assert one["loss_tokens"] == other["loss_tokens"] > 0
        counts.append(len(one["rows"]))
        trained = Counter(name for rank in (one, other) for rows in rank["rows"] for name, _ in rows)
        assert len(trained) == BATCH
        assert set(trained.values()) == {1}
    assert len(set(counts)) > 1, f"every step has {counts[0]} micro-batches: the test would not see uneven ones"
    exported = tmp_path / "runs" / "own" / "checkpoints" / "final"
    assert sorted(file.read_text() for file in exported.iterdir()) == [str(STEPS)] * RANKS


def test_arguments_that_its_factory_does_not_take_are_refused_before_anything_starts(tmp_path: Path, model: Path):
    from miles_command import Command

    (tmp_path / "replicas.py").write_text(BACKEND)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=model, log=tmp_path).replace("peers = 2", "pears = 2"))
    status, output = Command(tmp_path, "sft", "@", "run.toml").end(60.0)
    assert status != 0
    assert "train.backend is 'replicas:Replicas' and takes" in output
    assert not (tmp_path / "runs").exists()


def steps_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
