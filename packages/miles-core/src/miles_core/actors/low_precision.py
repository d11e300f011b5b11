"""A trainer rank in low precision: what `[quant]` makes of set-up, pushes and exports.

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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from miles_quant import (
    Recipe,
    check_boxes,
    largest_over_ranks,
    prepare_model,
    quantize_shards,
    round_shards,
    write_serving,
)
from miles_train.config import TrainConfig

logger = logging.getLogger(__name__)


def set_up(trainer: Any, config: TrainConfig, *, recipe: Recipe, model: Path) -> tuple[Any, Recipe]:
    """Set `trainer` up for `model`; returns its layout, and the recipe for a model of so many layers.

    Raises:
        QuantError: the recipe does not fit the model, or a rank's part of a matrix cuts a block.
    """
    recipe = fit(recipe, model)
    layout = trainer.setup(config, partial(prepare_model, recipe=recipe))
    check_boxes(trainer.shards(), recipe)
    return layout, recipe


def fit(recipe: Recipe, model: Path) -> Recipe:
    """`recipe` for the number of layers that the folder's configuration says."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layers = config.get("text_config", config).get("num_hidden_layers")
    return recipe if layers is None else recipe.for_model(int(layers))


def serving_shards(trainer: Any, recipe: Recipe) -> Iterator[Any]:
    """What engines get of this rank. Collective: maxima over the ranks are agreed on here, before anything is sent."""
    make = quantize_shards if recipe.quantize_activations else round_shards
    return make(trainer.shards, recipe, reduce_max=largest_over_ranks)


def export_serving(
    trainer: Any, path: Path, *, recipe: Recipe, dtype: Literal["float32", "bfloat16"], rank: int
) -> None:
    """Write a folder of what engines hold; rank 0 makes it from the master weights that all ranks export."""
    master = path.with_name(path.name + ".master")
    trainer.export_hf(master)
    if rank:
        return
    try:
        write_serving(master, path, recipe, dtype=dtype)
    finally:
        shutil.rmtree(master, ignore_errors=True)


def serving_folder(recipe: Recipe, *, model: Path, out: Path) -> Path:
    """The folder that engines start from: `model`, or its codes at `out` where engines hold codes.

    Engines with plain values start from any weights: a version is pushed before they generate.
    """
    if not recipe.quantize_activations:
        return model
    if not out.is_dir():
        write_serving(model, out, fit(recipe, model), dtype="bfloat16")
        logger.info("engines start from %s in %s", out, recipe.format)
    return out
