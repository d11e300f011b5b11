"""What the loop knows of a trainer, whatever its backend.

setup ─▶ ( train ─▶ shards ─▶ begin_save … finish_save )* ─▶ close
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from .batch import Batch, MicroBatch
<<<<<<< Updated upstream
=======
from .config import TrainConfig
from .errors import RankError
>>>>>>> Stashed changes

if TYPE_CHECKING:
    import torch

    from .config import TrainConfig

ModelName = Literal["policy", "reference"]
Kept = Literal["weights"]
"""What stays on the device while a trainer sleeps."""
Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) in each dimension of a tensor."""

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) in each dimension of a whole tensor."""


class Shard(NamedTuple):
    """One block of one weight, as this rank holds it."""

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
<<<<<<< Updated upstream
    """What one rank of a trainer set up; the driver plans with those of all ranks."""
=======
    """What one rank of a trainer set up, and which rows it is to be given: `setup` returns it."""
>>>>>>> Stashed changes

    rank: int
    ranks: int
    data_rank: int
<<<<<<< Updated upstream
    """Ranks with one data rank train the same rows: tensor, pipeline, context and expert parallel peers."""
    data_ranks: int
    micro_batch_multiple: int = 1
    """Each data rank gets a multiple of so many micro-batches; an interleaved pipeline asks for one of its stages."""
=======
    """Which share of every batch this rank trains: ranks with the same one hold parts of one replica (tensor,
    pipeline, context or expert parallel peers) and are given the same rows."""
    data_ranks: int
    """Shares that a batch is divided into."""
    micro_batch_multiple: int = 1
    """Every optimizer step has a multiple of so many micro-batches; an interleaved pipeline asks for its stages."""
>>>>>>> Stashed changes
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
<<<<<<< Updated upstream
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
        """One optimizer step for each batch given, one new version of the weights for all of them."""
        ...

    def score(self, micro_batches: Sequence[MicroBatch], *, model: ModelName = "policy") -> list[np.ndarray]:
        """Log-probs of the loss tokens at their sampling temperature, without a step.

        Returns:
            One [N] float32 array a micro-batch; 0 outside the loss mask.
        """
        ...

    def shards(self) -> Iterator[Shard]:
        """The weights as this rank holds them. Ranks that hold the same block may all yield it, as the same box."""
=======
    """One rank of a trainer, as core drives it and a backend writes it.

    Every method but `shards` is collective: call it on all ranks. `create_trainer` makes one.
    """

    def setup(self, config: TrainConfig, prepare_model: Callable[[torch.nn.Module], object] | None = None) -> Layout:
        """Join the other ranks and load the model; `prepare_model` changes a Hugging Face model in place before."""
        ...

    def train(self, batch: Batch | Sequence[Batch]) -> StepResult:
        """One optimizer step for each batch, one new version of the weights for all of them."""
        ...

    def shards(self) -> Iterator[Shard]:
        """Every block of every weight that this rank holds. Ranks that hold the same block may all yield it."""
        ...

    def score(self, micro_batches: Sequence[MicroBatch], *, model: ModelName = "policy") -> list[np.ndarray]:
        """Log-probs of the loss tokens without a step: [N] float32 a micro-batch, 0 outside the loss mask."""
>>>>>>> Stashed changes
        ...

    def begin_save(self, path: str | Path) -> None:
        """Copy what a checkpoint needs and return; it is written while training goes on."""
        ...

    def finish_save(self) -> None:
        """Wait until it is durable on every rank, or raise CheckpointError; safe beside `train`."""
        ...

    def load(self, path: str | Path) -> None:
<<<<<<< Updated upstream
        """Continue from a checkpoint."""
=======
        """Continue from a checkpoint, or raise CheckpointError and change nothing."""
>>>>>>> Stashed changes
        ...

    def export_hf(self, path: str | Path) -> None:
        """Write a folder that Transformers and SGLang load: config, safetensors, tokenizer."""
        ...

<<<<<<< Updated upstream
    def sleep(self, *, keep: frozenset[Literal["weights"]] = frozenset()) -> None:
        """Free the device: moments, and weights unless they are to be kept, go to host memory."""
=======
    def sleep(self, *, keep: frozenset[Kept] = frozenset()) -> None:
        """Free the device's memory until `wake`, but for what `keep` names."""
>>>>>>> Stashed changes
        ...

    def wake(self) -> None:
        """Back onto the device; without effect when awake."""
        ...

    def close(self) -> None:
<<<<<<< Updated upstream
        """Leave the other ranks and drop the model; may be called without `setup`, and again."""
        ...


def score(trainer: Trainer, batch: Batch, *, model: ModelName = "policy") -> list[np.ndarray]:
    """`Trainer.score` of a whole batch."""
=======
        """Leave the other ranks and drop the model."""
        ...


def check_layouts(layouts: Sequence[Layout]) -> None:
    """Refuse layouts under which some rows would not be trained, or ranks would wait for one another.

    Args:
        layouts: [ranks] as each rank's `setup` returned it.

    Raises:
        RankError: the ranks do not agree on the shares, or one of those is nobody's.
    """
    shapes = {(layout.data_ranks, layout.micro_batch_multiple) for layout in layouts}
    (shares, multiple), taken = next(iter(shapes)), {layout.data_rank for layout in layouts}
    if len(shapes) > 1 or taken != set(range(shares)) or multiple < 1:
        raise RankError(
            f"The {len(layouts)} ranks say (data_ranks, micro_batch_multiple) {sorted(shapes)} and are data ranks "
            f"{sorted(taken)}. All must name the same numbers, and every data rank from 0 on must be some rank's."
        )


def score(trainer: Trainer, batch: Batch, *, model: ModelName = "policy") -> list[np.ndarray]:
    """Log-probs of the loss tokens of a batch at their sampling temperature, without a step.

    Returns:
        One [N] float32 array a micro-batch; 0 outside the loss mask.
    """
>>>>>>> Stashed changes
    return trainer.score(batch.micro_batches, model=model)
