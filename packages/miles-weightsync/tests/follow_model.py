"""Versions of a small model that differ by a few values, as optimizer steps leave them, for engines of the fakes."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import weightsync_fakes
from weightsync_fakes import FakeEngine, weights

SHAPES = {
    "model.embed_tokens.weight": (60, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.norm.weight": (64,),
}
CONFIG = weightsync_fakes.CONFIG | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 60}
NBYTES = sum(tensor.nbytes for tensor in weights(0, SHAPES).values())


@functools.cache
def trained(version: int) -> dict[str, torch.Tensor]:
    """Version 1 is random; of each later one 2 % of the values differ from the version before."""
    if version == 1:
        return weights(1, SHAPES)
    tensors = {name: tensor.clone() for name, tensor in trained(version - 1).items()}
    generator = torch.Generator().manual_seed(version)
    for tensor in tensors.values():
        index = torch.randint(tensor.numel(), (max(1, tensor.numel() // 50),), generator=generator)
        tensor.view(-1)[index] *= 1.001
        tensor.view(-1)[0] = float(version)
    return tensors


class Engine(FakeEngine):
    """Notes each version with which it goes on generating, and whether it is that version bit for bit."""

    def __init__(self, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weightsync_fakes, "SHAPES", SHAPES)
            patch.setattr(weightsync_fakes, "CONFIG", CONFIG)
            super().__init__(**options)
        self.served: list[tuple[int, bool]] = []
        self.arrival = threading.Condition()

    def holds(self, version: int) -> bool:
        expected = trained(version)
        return self.version == str(version) and all(torch.equal(t, expected[n]) for n, t in self.params.items())

    def do_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        answer = super().do_continue_generation(body)
        with self.arrival:
            version = int(self.version)
            self.served.append((version, self.holds(version)))
            self.arrival.notify_all()
        return answer

    def wait_for(self, version: int, *, times: int = 1) -> None:
        """Until it has come to serve `version` so many times."""

        def is_there() -> bool:
            return [served for served, _ in self.served].count(version) >= times

        with self.arrival:
            assert self.arrival.wait_for(is_there, timeout=60), f"no version {version}, only {self.served}"
