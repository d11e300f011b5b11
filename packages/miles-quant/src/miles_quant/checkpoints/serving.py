"""The folder that an engine loads, made from the folder of master weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

from ..errors import ModelFolderError
from ..recipe.recipe import Recipe
from .convert import convert
from .dequantize import dequantize


def write_serving(
    source: str | Path, target: str | Path, recipe: Recipe, *, dtype: Literal["float32", "bfloat16"]
) -> Path:
    """Write at `target` what engines hold of the master weights in `source`; it appears whole or not at all.

    Codes and scales where the recipe quantises activations, which only an engine with low-precision kernels does; else
    the values that these stand for, in `dtype`.

    Returns:
        `target`.

    Raises:
        ModelFolderError: `source` is half-written or quantised already, or there is something at `target`.
        QuantError: the recipe does not fit the model.
    """
    target = Path(target)
    if target.exists():
        raise ModelFolderError(f"{target} exists; remove it or choose another folder.")
    packed, plain = (target.with_name(target.name + suffix) for suffix in (".packed", ".plain"))
    try:
        for left_over in (packed, plain):
            shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed here
        convert(source, packed, recipe, is_quiet=True)
        if recipe.quantize_activations:
            return packed.rename(target)
        dequantize(packed, plain, dtype=getattr(torch, dtype), is_quiet=True)
        return plain.rename(target)
    finally:
        for left_over in (packed, plain):
            shutil.rmtree(left_over, ignore_errors=True)
