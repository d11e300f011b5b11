"""A quantised folder back into plain weights: the values that engines compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .folder import ModelFolder
from .job import FolderJob, FolderReport
from .packed import PackedFolder
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
    folder = PackedFolder(ModelFolder(source))
    return _Dequantize(folder, dtype).run(target, workers=workers, is_quiet=is_quiet)


class _Dequantize(FolderJob):
    """Codes and scales become one plain matrix, where the codes were; everything else is copied."""

    def __init__(self, packed: PackedFolder, dtype: torch.dtype) -> None:
        super().__init__(packed.folder, title=f"dequantise {packed.format.name}", changed=packed.names)
        self._packed, self._dtype = packed, dtype
        codes, *others = (part.suffix for part in packed.format.parts)
        self._codes = {packed.parts(name)[codes]: name for name in packed.names}
        self._others = {packed.parts(name)[suffix] for name in packed.names for suffix in others}

    def targets(self, name: str) -> dict[str, TensorInfo]:
        if name in self._others:
            return {}
        if name not in self._codes:
            return {name: self.source.infos[name]}
        weight = self._codes[name]
        return {weight: TensorInfo(dtype=self._dtype, shape=self._packed.shape(weight))}

    def transform(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._codes:
            return {name: self.source.read(name)}
        weight = self._codes[name]
        return {weight: self._packed.format.dequantize(self._packed.read(weight), dtype=self._dtype)}

    def documents(self) -> dict[str, dict[str, Any]]:
        config = {key: value for key, value in self.source.config.items() if key != "quantization_config"}
        return {"config.json": {**config, "dtype": str(self._dtype).removeprefix("torch.")}}

    def identity(self) -> dict[str, Any]:
        return {"job": "dequantize", "dtype": str(self._dtype)}
