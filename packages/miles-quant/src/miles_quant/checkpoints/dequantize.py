"""A quantised folder back into plain weights: the values that engines compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .folder import ModelFolder
from .job import FolderJob, FolderReport
from .safetensors import TensorInfo


def dequantize(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    workers: int = 1,
    is_quiet: bool = False,
) -> FolderReport:
    """Write the quantised folder `source` as plain weights of `dtype`; an interrupted run goes on where it stopped.

    Raises:
        ModelFolderError: `source` is half-written or not quantised, or `target` is something else.
    """
    return _Dequantize(ModelFolder(source), dtype).run(target, workers=workers, is_quiet=is_quiet)


class _Dequantize(FolderJob):
    """Codes and scales become one plain matrix, where the codes were; everything else is copied."""

    def __init__(self, source: ModelFolder, dtype: torch.dtype) -> None:
        super().__init__(source, title=f"dequantise {source.format.name}", changed=source.quantized)
        self._dtype = dtype
        self._codes: dict[str, str] = {}
        self._others: set[str] = set()
        for name in source.quantized:
            codes, *others = source.stored_names(name).values()
            self._codes[codes] = name
            self._others.update(others)

    def targets(self, name: str) -> dict[str, TensorInfo]:
        if name in self._others:
            return {}
        if name not in self._codes:
            return {name: self.source.infos[name]}
        weight = self._codes[name]
        return {weight: TensorInfo(dtype=self._dtype, shape=self.source.shape(weight))}

    def transform(self, name: str) -> dict[str, torch.Tensor]:
        weight = self._codes.get(name, name)
        return {weight: self.source.values(weight, self._dtype)}

    def documents(self) -> dict[str, dict[str, Any]]:
        config = {key: value for key, value in self.source.config.items() if key != "quantization_config"}
        return {"config.json": {**config, "dtype": str(self._dtype).removeprefix("torch.")}}

    def identity(self) -> dict[str, Any]:
        return {"job": "dequantize", "dtype": str(self._dtype)}
