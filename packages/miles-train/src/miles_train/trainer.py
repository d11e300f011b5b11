"""What the loop knows of a trainer, whatever its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from .batch import Batch, MicroBatch
from .config import TrainConfig

if TYPE_CHECKING:
    import torch

ModelName = Literal["policy", "reference"]


class Shard(NamedTuple):
    """One block of one weight, as this rank holds it."""

    name: str
    """Hugging Face name."""
    global_shape: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, …"""
    box: tuple[tuple[int, int], ...]
    """Half-open (start, stop) in each dimension."""
    tensor: torch.Tensor
    """The block itself; it aliases the weight, so use it before the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a trainer set up."""

    rank: int
    ranks: int
    device: str
    num_parameters: int
    """Of the whole model, tied weights once."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one call of `train` did; the same on every rank."""

    version: int
    """Version of the weights after it. Freshly loaded weights are version 0."""
    metrics: Mapping[str, float]


class Trainer(Protocol):
    """One rank of a trainer. Every method but `shards` is collective: call it on all ranks."""

    def setup(
        self, config: TrainConfig, prepare_model: Callable[[torch.nn.Module], object] | None = None
    ) -> Layout: ...

    def train(self, batch: Batch | Sequence[Batch]) -> StepResult: ...

    def shards(self) -> Iterator[Shard]: ...

    def begin_save(self, path: str | Path) -> None:
        """Copy what a checkpoint needs and return; it is written while training goes on."""
        ...

    def finish_save(self) -> None:
        """Wait until it is durable on every rank, or raise CheckpointError; safe beside `train`."""
        ...

    def load(self, path: str | Path) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Scorer(Protocol):
    """The forward pass of a backend."""

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, model: ModelName) -> list[np.ndarray]: ...


def score(backend: Scorer, batch: Batch, *, model: ModelName = "policy") -> list[np.ndarray]:
    """Log-probs of the loss tokens of a batch at their sampling temperature, without a step.

    Returns:
        One [N] float32 array a micro-batch; 0 outside the loss mask.
    """
    return backend.logprobs(batch.micro_batches, model=model)
