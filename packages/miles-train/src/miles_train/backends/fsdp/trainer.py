"""One rank of an FSDP2 trainer.

setup ─▶ ( train ─▶ shards ─▶ begin_save … finish_save )*
          │
          ├─ same counts on every rank? missing old and reference log-probs scored
          └─ per optimizer step: forward and backward of each micro-batch ─▶ reduce ─▶ clip ─▶ AdamW
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from miles_tito.shared.settings import SettingError
from torch.distributed.device_mesh import init_device_mesh

from miles_train.batch import Batch, MicroBatch
from miles_train.checkpoint.reader import load_checkpoint
from miles_train.checkpoint.writer import CheckpointWriter, Progress
from miles_train.errors import RankError
from miles_train.losses import LossFn, resolve_loss
from miles_train.metrics import Tally, joined
from miles_train.ranks import Ranks, join, pick_device
from miles_train.step.batches import check_batches, lacks_reference, sizes, with_scores
from miles_train.step.objective import Objective
from miles_train.trainer import Kept, Layout, ModelName, Shard, StepResult, Trainer

from .export import export_model
from .model import PolicyModel, load_model, num_parameters, shard_model
from .optimizer import Optimizer
from .shards import model_shards, state_blocks
from .step import accumulate, score_micro_batches

if TYPE_CHECKING:
    from miles_train.config import TrainConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _State:
    """What exists between `setup` and `close`."""

    config: TrainConfig
    ranks: Ranks
    model: PolicyModel
    reference: PolicyModel | None
    optimizer: Optimizer
    loss_fn: LossFn
    writer: CheckpointWriter | None = None
    asleep_with: frozenset[Kept] | None = None
    """What stayed on the device when it fell asleep; None while awake."""


class FSDPTrainer(Trainer):
    """One rank that trains any Hugging Face causal language model with FSDP2; `create_trainer` makes it."""

    def __init__(self, model_path: str | Path, *, rank: int = 0, init_method: str | None = None) -> None:
        """
        Args:
            model_path: a Hugging Face folder.
            rank: of this process; the number of ranks is the configuration's.
            init_method: where the ranks meet (`tcp://HOST:PORT` of rank 0); not needed for a single rank.
        """
        self.version = 0
        self._model_path = Path(model_path)
        self._rank = rank
        self._init_method = init_method
        self._state: _State | None = None

    def setup(self, config: TrainConfig, prepare_model: Callable[[torch.nn.Module], object] | None = None) -> Layout:
        if self._state is not None:
            raise RankError("This trainer is set up already; close() it first, or make another.")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        device = pick_device(config.device)
        ranks = join(
            rank=self._rank,
            count=config.ranks,
            init_method=self._init_method,
            device=device,
            timeout_s=config.collective_timeout_s,
            needs_group=config.dtype != config.master_dtype,
        )
        model = self._build(config, ranks, prepare_model)
        reference = self._build(config, ranks, prepare_model) if "reference" in config.loss.needs else None
        if reference is not None:
            reference.requires_grad_(False)
        if config.fsdp.activation_checkpointing:
            model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._state = _State(
            config=config,
            ranks=ranks,
            model=model.train(),
            reference=reference,
            optimizer=Optimizer(model.lm, config=config.optimizer, schedule=config.schedule, ranks=ranks),
            loss_fn=resolve_loss(config.loss),
        )
        layout = Layout(
            rank=ranks.rank,
            ranks=ranks.count,
            data_rank=ranks.rank,
            data_ranks=ranks.count,
            device=str(device),
            num_parameters=num_parameters(model),
            vocab_size=model.vocab_size,
        )
        logger.info(
            "%s: %.2f M parameters in %s on %d %s; loss %s averaged per %s (loss.normalization)",
            self._model_path.name,
            layout.num_parameters / 1e6,
            config.dtype,
            layout.ranks,
            device.type,
            config.loss.kind,
            config.loss.normalization,
        )
        return layout

    def train(self, batch: Batch | Sequence[Batch]) -> StepResult:
        state = self._awake()
        start = time.perf_counter()
        batches = [batch] if isinstance(batch, Batch) else list(batch)
        check_batches(batches, vocab_size=state.model.vocab_size, config=state.config)
        lacks = lacks_reference(batches, state.ranks)
        batches = with_scores(batches, state.config.loss, partial(_scored, state), some_lack_reference=lacks)
        tally = Tally()
        steps: list[dict[str, float]] = []
        for index, part in enumerate(batches):
            objective = Objective(
                state.config.loss,
                state.loss_fn,
                device=state.ranks.device,
                tally=tally,
                version=self.version,
                is_first=index == 0,
            )
            try:
                accumulate(state.model, part, objective, entropy=state.config.loss.needs_entropy, ranks=state.ranks)
                steps.append(state.optimizer.step())
            finally:
                state.optimizer.zero_grad()
        self.version += 1
        metrics = joined(state.ranks.gather(tally.close()))
        metrics["loss/total"] /= len(batches)
        metrics |= {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        metrics |= sizes(batches, state.ranks)
        metrics["trainer/step_seconds"] = time.perf_counter() - start
        return StepResult(version=self.version, metrics=metrics)

    def score(self, micro_batches: Sequence[MicroBatch], *, model: ModelName = "policy") -> list[np.ndarray]:
        state = self._awake("weights")
        state.ranks.check_equal("Numbers of micro-batches", [len(micro_batches)])
        return _scored(state, micro_batches, model)

    def shards(self) -> Iterator[Shard]:
        """The weights as this rank holds them, in the type that the forward pass uses; no communication."""
        state = self._awake("weights")
        state.model.reshard()
        return model_shards(
            state.model.lm,
            rank=state.ranks.rank,
            ranks=state.ranks.count,
            dtype=getattr(torch, state.config.dtype),
        )

    def begin_save(self, path: str | Path) -> None:
        state = self._awake()
        state.model.reshard()
        if state.writer is None:
            state.writer = CheckpointWriter(state.ranks)
        blocks = state_blocks(state.model.lm, state.optimizer, state.ranks)
        state.writer.begin(
            Path(path),
            (block for block, is_ours in blocks if is_ours),
            progress=Progress(version=self.version, optimizer_steps=state.optimizer.num_steps),
            device=state.ranks.device,
        )

    def finish_save(self) -> None:
        writer = self._ready().writer
        if writer is not None:
            writer.finish()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint and wait for it."""
        self.begin_save(path)
        self.finish_save()

    def load(self, path: str | Path) -> None:
        state = self._awake()
        state.model.reshard()
        blocks = state_blocks(state.model.lm, state.optimizer, state.ranks)
        progress = load_checkpoint(Path(path), (block for block, _ in blocks), ranks=state.ranks)
        self.version = progress.version
        state.optimizer.num_steps = progress.optimizer_steps

    def export_hf(self, path: str | Path) -> None:
        state = self._awake("weights")
        dtype = getattr(torch, state.config.dtype)
        export_model(path, state.model.lm, source=self._model_path, dtype=dtype, ranks=state.ranks)

    def sleep(self, *, keep: frozenset[Kept] = frozenset()) -> None:
        """Free the GPU: moments, and weights unless they are to be kept, go to host memory. On a CPU nothing moves."""
        state = self._awake()
        state.optimizer.zero_grad()
        self._move(torch.device("cpu"), weights="weights" not in keep)
        state.asleep_with = keep

    def wake(self) -> None:
        state = self._ready()
        if state.asleep_with is not None:
            self._move(state.ranks.device, weights=True)
            state.asleep_with = None

    def close(self) -> None:
        """Leave the process group and drop the model; a checkpoint that is being written is written first."""
        if self._state is not None:
            if self._state.writer is not None:
                self._state.writer.close()
            self._state.ranks.close()
            self._state = None

    def _build(
        self, config: TrainConfig, ranks: Ranks, prepare_model: Callable[[torch.nn.Module], object] | None
    ) -> PolicyModel:
        model = load_model(self._model_path, config)
        if prepare_model is not None:
            prepare_model(model.lm)
        if ranks.group is None:
            return model.to(ranks.device)
        shard_model(model, init_device_mesh(ranks.device.type, (ranks.count,)), config)
        return model.to(ranks.device)  # buffers of modules that hold no parameter

    def _move(self, device: torch.device, *, weights: bool) -> None:
        state = self._ready()
        if state.ranks.device.type == "cpu":
            return
        if weights:
            state.model.to(device)
            if state.reference is not None:
                state.reference.to(device)
        state.optimizer.move_state(device)
        torch.cuda.empty_cache()

    def _ready(self) -> _State:
        if self._state is None:
            raise RankError("This trainer is not set up; call setup(config) first.")
        return self._state

    def _awake(self, needed: Kept | None = None) -> _State:
        """The state; one that sleeps is refused, unless it has kept all that is needed."""
        state = self._ready()
        if state.asleep_with is not None and needed not in state.asleep_with:
            raise RankError("This trainer sleeps; call wake() before you use its weights.")
        return state


def _scored(state: _State, micro_batches: Sequence[MicroBatch], model: ModelName) -> list[np.ndarray]:
    chosen = state.model if model == "policy" else state.reference
    if chosen is None:
        raise SettingError(
            "There is no reference model: it is held only for a loss that needs it, as with `loss.kl_coef` above 0."
        )
    return score_micro_batches(chosen, micro_batches, state.ranks.device)
