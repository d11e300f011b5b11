"""A Hugging Face folder into the same model in a low-precision format."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelFolderError
from ..formats.spec import check_floating, round_to_source, stored_name
from ..recipe.hf import MODELOPT_FILE, RECIPE_FILE, modelopt_config, quantization_config
from ..recipe.recipe import Recipe, siblings
from .folder import ModelFolder
from .job import FolderJob, FolderReport
from .safetensors import TensorInfo


def convert(
    source: str | Path, target: str | Path, recipe: Recipe, *, workers: int = 1, is_quiet: bool = False
) -> FolderReport:
    """Quantise the folder `source` into `target`; an interrupted run goes on where it stopped.

    Memory is bounded by `workers` times the largest tensor. One worker writes one file.

    Raises:
        ModelFolderError: `source` is half-written or already quantised, or `target` is something else.
        QuantError: the recipe does not fit the model, or a weight holds NaN or Inf.
    """
    folder = ModelFolder(source)
    if folder.recipe is not None:
        raise ModelFolderError(f"{source} is quantised already ({folder.recipe.format}); dequantize it first.")
    if folder.num_layers is not None:
        recipe = recipe.for_model(folder.num_layers)
    return _Quantize(folder, recipe).run(target, workers=workers, is_quiet=is_quiet)


class _Quantize(FolderJob):
    """Every matrix that the recipe picks becomes codes and scales; everything else is copied."""

    def __init__(self, source: ModelFolder, recipe: Recipe) -> None:
        shapes = {name: info.shape for name, info in source.infos.items()}
        super().__init__(source, title=f"quantise to {recipe.spec.name}", changed=recipe.select(shapes))
        for name in sorted(self.changed):
            check_floating(name, source.infos[name].dtype)
        self._recipe, self._format = recipe, recipe.spec
        self._amaxes: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        quantization_config(recipe)  # refuses a format that no engine loads before anything is written

    def targets(self, name: str) -> dict[str, TensorInfo]:
        info = self.source.infos[name]
        if name not in self.changed:
            return {name: info}
        return {
            stored_name(name, part.suffix): TensorInfo(dtype=part.dtype, shape=part.shape_of(info.shape))
            for part in self._format.parts
        }

    def transform(self, name: str) -> dict[str, torch.Tensor]:
        tensor = self.source.read(name)
        if name not in self.changed:
            return {name: tensor}
        tensor = self._rounded(name, tensor)
        amax = self._shared_amax(name, tensor) if self._format.name.has_tensor_scale else None
        stored = self._format.store(self._format.quantize(tensor, amax=amax))
        return {stored_name(name, suffix): part for suffix, part in stored.items()}

    def documents(self) -> dict[str, dict[str, Any]]:
        kept = [n for n, info in self.source.infos.items() if is_linear(n, info.shape) and n not in self.changed]
        modelopt = modelopt_config(self._recipe, kept)
        return {
            **({MODELOPT_FILE: modelopt} if modelopt else {}),
            RECIPE_FILE: {"recipe": self._recipe.to_dict(), "quantised": len(self.changed)},
            "config.json": {**self.source.config, "quantization_config": quantization_config(self._recipe, kept)},
        }

    def identity(self) -> dict[str, Any]:
        return {"job": "convert", "recipe": self._recipe.to_dict()}

    def _shared_amax(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The largest value of the tensor and its fused siblings, each read at most twice."""
        largest = self._amax(name, tensor)
        for sibling in siblings(name):
            if sibling != name and sibling in self.source.infos:
                largest = torch.maximum(largest, self._amax(sibling, None))
        return largest

    def _amax(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
        with self._lock:
            if name in self._amaxes:
                return self._amaxes[name]
        amax = self._format.amax(self._rounded(name, self.source.read(name)) if tensor is None else tensor)
        with self._lock:
            self._amaxes[name] = amax
        return amax

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return round_to_source(name, tensor, getattr(torch, self._recipe.source_dtype))


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Is this the weight of a linear module, which a list of unquantised modules has to name?"""
    return len(shape) == 2 and name.endswith(".weight") and "embed" not in name
