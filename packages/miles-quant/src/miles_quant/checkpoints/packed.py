"""The quantised matrices of a folder: which there are, and their codes and scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ModelFolderError
from ..formats.spec import Format, QuantizedTensor, stored_name
from .folder import ModelFolder
from .safetensors import TensorInfo


class PackedFolder:
    """The quantised matrices of a folder, by the name that their weight had (`x.weight`).

    `dequantize`, `compare` and `load_packed` read codes and scales through it.

    Raises:
        ModelFolderError: the folder is not quantised, or a matrix lacks some of its tensors.
    """

    def __init__(self, folder: ModelFolder) -> None:
        recipe = folder.recipe
        if recipe is None:
            raise ModelFolderError(f"{folder.path} is not quantised: its config.json has no quantization_config.")
        self.folder, self.recipe, self.format = folder, recipe, recipe.spec
        self.names = find_packed(self.format, folder.infos)
        if not self.names:
            raise ModelFolderError(
                f"{folder.path} is said to be quantised to {self.format.name}, and none of its {len(folder.infos)} "
                f"tensors is: no name ends in .{self.format.parts[1].suffix}."
            )

    def parts(self, name: str) -> dict[str, str]:
        """Names of the stored tensors of a matrix, by suffix."""
        return {part.suffix: stored_name(name, part.suffix) for part in self.format.parts}

    def shape(self, name: str) -> tuple[int, int]:
        """Of a matrix, without reading its codes."""
        stored = self.parts(name)
        if "weight_shape" in stored:
            rows, columns = self.folder.read(stored["weight_shape"]).tolist()
            return rows, columns
        return self.format.shape_of_codes(self.folder.infos[stored[self.format.parts[0].suffix]].shape)

    def read(self, name: str) -> QuantizedTensor:
        """Codes and scales of one matrix."""
        return self.format.restore(self.read_stored(name))

    def read_stored(self, name: str) -> dict[str, torch.Tensor]:
        """The stored tensors of one matrix, by suffix."""
        return {suffix: self.folder.read(stored) for suffix, stored in self.parts(name).items()}


def find_packed(format: Format, infos: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Names (`x.weight`) of all matrices whose tensors are there in the types of `format`."""
    codes, scale = format.parts[0], format.parts[1]
    found: set[str] = set()
    for stored, info in infos.items():
        if not stored.endswith(f".{scale.suffix}"):
            continue
        name = stored.removesuffix(scale.suffix) + "weight"
        missing = [part.suffix for part in format.parts if stored_name(name, part.suffix) not in infos]
        if missing:
            raise ModelFolderError(f"{name} has {stored} but lacks {', '.join(missing)} of {format.name}.")
        if infos[stored_name(name, codes.suffix)].dtype != codes.dtype or info.dtype != scale.dtype:
            raise ModelFolderError(
                f"{stored} is {info.dtype} beside codes of {infos[stored_name(name, codes.suffix)].dtype}; "
                f"{format.name} stores {scale.dtype} and {codes.dtype}."
            )
        found.add(name)
    for stored, info in infos.items():
        name = stored.removesuffix(codes.suffix) + "weight"
        if stored.endswith(f".{codes.suffix}") and info.dtype == codes.dtype and name not in found:
            raise ModelFolderError(f"{stored} holds codes of {info.dtype}, and there is no .{scale.suffix} beside it.")
    return frozenset(found)
