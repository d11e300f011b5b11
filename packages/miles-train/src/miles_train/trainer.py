"""What the loop knows of a trainer, whatever its backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from .batch import Batch, MicroBatch
from .errors import RankError

if TYPE_CHECKING:
    import torch

    from .config import TrainConfig

ModelName = Literal["policy", "reference"]
Kept = Literal["weights"]
"""What can stay on the device while a trainer sleeps."""

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) in each dimension of a whole tensor."""


class Shard(NamedTuple):
    """One block of one weight, as this rank holds it: `Trainer.shards` yields them, a push sends them to engines."""

    name: str
    """Hugging Face name."""
    global_shape: tuple[int, ...]
    dtype: str
    """`float32`, `bfloat16`, …"""
    box: Box
    tensor: torch.Tensor
    """The block itself; it aliases the weight, so use it before the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What `Trainer.setup` made on one rank; whoever plans batches reads which rows the rank is to get."""

    rank: int
    ranks: int
    data_rank: int
    """Ranks with one data rank train the same rows: tensor, pipeline, context and expert parallel peers."""
    data_ranks: int
    micro_batch_multiple: int = 1
    """Each data rank gets a multiple of so many micro-batches; an interleaved pipeline asks for one of its stages."""
    device: str
    num_parameters: int
    """Of the whole model, tied weights once."""
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one call of `Trainer.train` did; the same on every rank."""

    version: int
    """Version of the weights after it. Freshly loaded weights are version 0."""
    metrics: Mapping[str, float]


class Trainer(Protocol):
    """One rank of a trainer backend, built by `create_trainer`; miles-core drives all ranks of a run by these methods.

    Every method but `shards` is collective: call it on all ranks.
    """

    def setup(self, config: TrainConfig, prepare_model: Callable[[torch.nn.Module], object] | None = None) -> Layout:
        """Join the other ranks, load the model and shard it, make the optimizer.

        Args:
            prepare_model: changes a Hugging Face model in place before it is sharded.
        """
        ...

    def train(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """One optimizer step for each batch given, one new version of the weights for all of them.

        Raises:
            NumericsError: a log-prob, loss or gradient is not finite; the weights of the failed step are unchanged.
        """
        ...

    def score(self, micro_batches: Sequence[MicroBatch], *, model: ModelName = "policy") -> list[np.ndarray]:
        """Log-probs of the loss tokens at their sampling temperature, without a step.

        Returns:
            One [N] float32 array a micro-batch; 0 outside the loss mask.
        """
        ...

    def shards(self) -> Iterator[Shard]:
        """The weights as this rank holds them. Ranks that hold the same block may all yield it, as the same box."""
        ...

    def begin_save(self, path: str | Path) -> None:
        """Copy weights, moments and random states to host memory and return; they are written while training goes on.

        Raises:
            CheckpointError: `finish_save` has not been called since the last one was begun.
        """

    def finish_save(self) -> None:
        """Wait until the checkpoint that was begun is durable on every rank; safe in a thread beside `train`.

        Raises:
            CheckpointError: some rank could not write it; nothing of it is left at its path.
        """

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, also one of another number of ranks.

        Raises:
            CheckpointError: it is absent, incomplete or of another model; nothing has been changed.
        """

    def export_hf(self, path: str | Path) -> None:
        """Write a folder that Transformers and SGLang load: config, safetensors, tokenizer."""

    def sleep(self, *, keep: frozenset[Kept] = frozenset()) -> None:
        """Free the device but for what `keep` names; with "weights" `shards`, `score` and `export_hf` go on working."""

    def wake(self) -> None:
        """Back onto the device; without effect when awake."""

    def close(self) -> None:
        """Leave the other ranks and drop the model; may be called without `setup`, and again."""


def check_layouts(layouts: Sequence[Layout]) -> None:
    """Refuse layouts under which rows would not be trained, or ranks would wait for one another.

    Args:
        layouts: [ranks] what `setup` returned on each.

    Raises:
        RankError: the ranks do not agree on the number of data ranks, or one of these is nobody's.
    """
    shapes = {(layout.data_ranks, layout.micro_batch_multiple) for layout in layouts}
    (data_ranks, multiple), *others = sorted(shapes)
    taken = {layout.data_rank for layout in layouts}
    if others or taken != set(range(data_ranks)) or multiple < 1:
        raise RankError(
            f"The {len(layouts)} ranks name (data_ranks, micro_batch_multiple) {sorted(shapes)} and are data ranks "
            f"{sorted(taken)}. All must name the same two numbers, and every data rank from 0 on must be some rank's."
        )


def score(trainer: Trainer, batch: Batch, *, model: ModelName = "policy") -> list[np.ndarray]:
    """`Trainer.score` of a whole batch."""
    return trainer.score(batch.micro_batches, model=model)
