"""One trainer rank as the loop uses it: builds its batches from groups, trains, pushes its own shards.

A plain class, which `cluster.trainers` gives a process each. Nothing here imports torch before it is used, so that the
driver can import this module without. With a recipe, `[quant]`, a rank is in low precision:

                  ┌ forward and backward on the values of the codes
master weights ───┼ push:   codes and scales, or the values that these stand for
                  └ export: the same, as a folder

Which of the two engines get, `quantize_activations` says: only an engine with low-precision kernels quantises those,
and it holds codes; any other holds plain values.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import miles_quant
from miles_quant import Recipe
from miles_tito.records import Group, Sample
from miles_tito.records.episodes import to_samples
from miles_tito.shared.ports import free_port
from miles_train import Layout, create_trainer
from miles_train.batch import Batch, make_batch
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig
from miles_weightsync.errors import SyncError

from miles_core.batching import OptimizerStep, RankWork, Trained
from miles_core.config import ModelConfig

from .model_folder import prepare_model_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """How one push ended."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of a push that reached every engine."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Engines that do not serve the version, with the reason; the others do."""


class TrainerRank:
    """One rank of the trainer, with its part of every batch and its shards of every push.

    `TrainerRanks` keeps one in a process for each rank. `setup` comes first, and may be called again to train another
    model in the same process; what says "collective" is called on all ranks at once.
    """

    def __init__(
        self, *, rank: int, recipe: Recipe | None = None, fetch: Callable[[Sequence[Any]], Sequence[Group]]
    ) -> None:
        """
        Args:
            recipe: the low precision that this rank trains in, and that engines get; None for `config.dtype`.
            fetch: reads the groups behind the handles of a `RankWork`.
        """
        self._rank = rank
        self._fetch = fetch
        self._given = recipe
        self._recipe = recipe
        self._trainer: Any = None
        self._pusher: Any = None
        self._config = TrainConfig()

    def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The model folder of the run; here because builders tend to need torch, and the driver does without."""
        return prepare_model_folder(config, out=out)

    def serving_folder(self, model: Path, out: Path) -> Path:
        """The folder that engines start from: `model`, or its codes at `out` where engines hold codes.

        Engines with plain values start from any weights: a version is pushed before they generate.
        """
        recipe = self._given
        if recipe is None or not recipe.quantize_activations:
            return model
        if not out.is_dir():
            miles_quant.write_serving(model, out, _for_model(recipe, model), dtype="bfloat16")
            logger.info("engines start from %s in %s", out, recipe.format)
        return out

    def free_port(self) -> int:
        """Where the ranks can meet on this machine."""
        return free_port()

    def setup(self, config: TrainConfig, model: Path, init_method: str | None) -> Layout:
        """Load `model` and join the other ranks; returns the trainer's `Layout`.

        Raises:
            QuantError: the recipe does not fit the model, or a rank's part of a matrix cuts a block.
        """
        self.close()
        self._config = config
        self._trainer = create_trainer(config, model_path=model, rank=self._rank, init_method=init_method)
        if self._given is None:
            return self._trainer.setup(config)
        self._recipe = _for_model(self._given, model)
        layout = self._trainer.setup(config, partial(miles_quant.prepare_model, recipe=self._recipe))
        miles_quant.check_boxes(self._trainer.shards(), self._recipe)
        return layout

    def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        """Name the engines that `push` serves. Collective."""
        from miles_weightsync.push import Pusher

        self._close_pusher()
        self._pusher = Pusher(engines, config=config)

    def train(self, work: RankWork) -> Trained:
        """One batch. Collective."""
        groups = self._fetch(work.handles)
        batches = [self._batch(step, groups) for step in work.steps]
        result = self._trainer.train(batches)
        return Trained(version=result.version, metrics=dict(result.metrics))

    def push(self, version: int, engines: Sequence[str]) -> Pushed:
        """Send this rank's shards to `engines`. Collective.

        Raises:
            SyncError: it failed before it reached any engine.
        """
        self._pusher.set_engines(engines)
        try:
            report = self._pusher.push(self._shards(), version=version)
        except SyncError as error:
            if not error.engines:
                raise
            return Pushed(failed={e.url: f"{e.phase}: {e.error}" for e in error.engines if not e.ok})
        return Pushed(metrics=dict(report.metrics))

    def begin_save(self, path: Path) -> None:
        """Copy what a checkpoint holds to host memory; it is written behind training. Collective."""
        self._trainer.begin_save(path)

    def finish_save(self) -> None:
        """Wait until it is durable on every rank; beside `train`, in a thread of its own."""
        self._trainer.finish_save()

    def load(self, path: Path) -> None:
        """Weights, moments, schedule, random states and version of a checkpoint. Collective."""
        self._trainer.load(path)

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder of the master weights. Collective."""
        self._trainer.export_hf(path)

    def export_serving(self, path: Path) -> None:
        """Write a Hugging Face folder of what engines hold; rank 0 makes it of the master weights. Collective."""
        if self._recipe is None:
            self.export(path)
            return
        master = path.with_name(path.name + ".master")
        self.export(master)
        if self._rank == 0:
            try:
                miles_quant.write_serving(master, path, self._recipe, dtype=self._config.dtype)
            finally:
                shutil.rmtree(master, ignore_errors=True)

    def close(self) -> None:
        self._close_pusher()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _shards(self) -> Iterable[Any]:
        """What engines get of this rank. Collective: maxima over the ranks are agreed on before anything is sent."""
        recipe = self._recipe
        if recipe is None:
            return self._trainer.shards()
        make = miles_quant.quantize_shards if recipe.quantize_activations else miles_quant.round_shards
        return make(self._trainer.shards, recipe, reduce_max=miles_quant.largest_over_ranks)

    def _close_pusher(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None

    def _batch(self, step: OptimizerStep, groups: Sequence[Group]) -> Batch:
        samples: dict[tuple[int, int], dict[str, Sample]] = {}

        def sample(group: int, episode: int, trajectory: int, advantage: float) -> Sample:
            record = groups[group].episodes[episode]
            if (group, episode) not in samples:
                samples[group, episode] = {s.id: s for s in to_samples(record, advantage)}
            return samples[group, episode][record.trajectories[trajectory].id]

        loss = self._config.loss
        return make_batch(
            [[sample(r.group, r.episode, r.trajectory, r.advantage) for r in rows] for rows in step.micro_batches],
            step.totals,
            normalization=loss.normalization,
            max_tokens=loss.max_tokens,
        )


def _for_model(recipe: Recipe, model: Path) -> Recipe:
    """`recipe` for the number of layers that the folder's configuration says."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = config.get("text_config", config).get("num_hidden_layers")
    return recipe if layers is None else recipe.for_model(int(layers))
