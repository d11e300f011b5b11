"""A Hugging Face model folder, plain or quantised: its configuration and its tensors, whatever file they are in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelFolderError
from ..formats.spec import Format, stored_name
from ..recipe.hf import MODELOPT_FILE, RECIPE_FILE, recipe_of_config
from ..recipe.recipe import Recipe
from .safetensors import TensorFile, TensorInfo

INDEX_FILE = "model.safetensors.index.json"
PROGRESS_FILE = "miles_quant.progress.json"


class ModelFolder:
    """A Hugging Face model folder opened for reading; everything that converts, compares or loads one starts here.

    The whole folder is checked when it is opened, and what is quantised in it when that is first asked for. `infos`
    describes every stored tensor by name, in the order of the files. A quantised matrix goes by the name that its
    weight had (`x.weight`).

    Raises:
        ModelFolderError: no configuration, a file or tensor of the index is missing, a file is half-written, or a
            conversion into this folder has not finished.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (self.path / PROGRESS_FILE).exists():
            raise ModelFolderError(f"A conversion into {path} has not finished; run the same command again first.")
        self.config: dict[str, Any] = self._json("config.json", "it is not a model folder, or it is half-written")
        self.files = {file.path.name: file for file in self._open_files()}
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files.values():
            for name, info in file.infos.items():
                if name in self.infos:
                    raise ModelFolderError(f"{name} is in {self._file_of[name].path.name} and in {file.path.name}.")
                self.infos[name], self._file_of[name] = info, file

    @property
    def num_layers(self) -> int | None:
        """What the configuration says, of the language model where there are several."""
        text = self.config.get("text_config")
        number = (text if isinstance(text, dict) else self.config).get("num_hidden_layers")
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ModelFolderError(f"num_hidden_layers is {number!r} in {self.path / 'config.json'}; it is a count.")
        return number

    @cached_property
    def recipe(self) -> Recipe | None:
        """How the folder was quantised, by its own record or else by its `quantization_config`; None if it was not."""
        if (self.path / RECIPE_FILE).exists():
            recipe = self._json(RECIPE_FILE, "").get("recipe")
            if not isinstance(recipe, dict):
                raise ModelFolderError(f"{self.path / RECIPE_FILE} holds no recipe; it is damaged.")
            return Recipe.from_dict(recipe)
        config = self.config.get("quantization_config")
        if config is None and (self.path / MODELOPT_FILE).exists():
            config = self._json(MODELOPT_FILE, "")
        return None if config is None else recipe_of_config(config)

    @cached_property
    def format(self) -> Format:
        """The format of the quantised matrices.

        Raises:
            ModelFolderError: the folder is not quantised.
        """
        if self.recipe is None:
            raise ModelFolderError(f"{self.path} is not quantised: its config.json has no quantization_config.")
        return self.recipe.spec

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Names of the quantised matrices; empty for a plain folder.

        Raises:
            ModelFolderError: a matrix lacks some of its tensors, or the configuration says more than the files hold.
        """
        if self.recipe is None:
            return frozenset()
        found = _find_quantized(self.format, self.infos)
        if not found:
            raise ModelFolderError(
                f"{self.path} is said to be quantised to {self.format.name}, and none of its {len(self.infos)} "
                f"tensors is: no name ends in .{self.format.parts[1].suffix}."
            )
        return found

    @property
    def names(self) -> list[str]:
        """The names of the model's plain checkpoint: as stored, then the quantised matrices."""
        stored = {part for name in self.quantized for part in self.stored_names(name).values()}
        return [*(name for name in self.infos if name not in stored), *sorted(self.quantized)]

    @property
    def digest(self) -> str:
        """SHA-256 of every file's size, header and modification time; interrupted jobs know their source by it."""
        known = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            status = file.path.stat()
            known.update(f"{name} {status.st_size} {status.st_mtime_ns}".encode() + file.header)
        return known.hexdigest()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own."""
        return self._file_of[name].read(name)

    def stored_names(self, name: str) -> dict[str, str]:
        """Names of the tensors that a quantised matrix is stored as, by suffix."""
        return {part.suffix: stored_name(name, part.suffix) for part in self.format.parts}

    def read_stored(self, name: str) -> dict[str, torch.Tensor]:
        """The stored tensors of a quantised matrix, by suffix."""
        return {suffix: self.read(stored) for suffix, stored in self.stored_names(name).items()}

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A quantised matrix as its values in `dtype`; any other tensor as it is."""
        if name not in self.quantized:
            return self.read(name)
        return self.format.dequantize(self.format.restore(self.read_stored(name)), dtype=dtype)

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a quantised matrix, without reading its codes."""
        stored = self.stored_names(name)
        if "weight_shape" in stored:
            rows, columns = self.read(stored["weight_shape"]).tolist()
            return rows, columns
        return self.format.shape_of_codes(self.infos[stored[self.format.parts[0].suffix]].shape)

    def _open_files(self) -> list[TensorFile]:
        if not (self.path / INDEX_FILE).exists():
            found = sorted(self.path.glob("*.safetensors"))
            if len(found) != 1:
                raise ModelFolderError(
                    f"{self.path} has {len(found)} .safetensors files and no {INDEX_FILE}; "
                    "it needs one file, or an index."
                )
            return [TensorFile(found[0])]
        weight_map = self._json(INDEX_FILE, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFolderError(f"{self.path / INDEX_FILE} has no weight_map of tensors to files.")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFolderError(f"{INDEX_FILE} puts {name} into {file!r}, which is no file beside it.")
        files = [TensorFile(self.path / name) for name in sorted(set(weight_map.values()))]
        held = {file.path.name: file.infos for file in files}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise ModelFolderError(f"{INDEX_FILE} puts {name} into {file}, which does not hold it.")
        unlisted = sorted({name for infos in held.values() for name in infos} - set(weight_map))
        if unlisted:
            raise ModelFolderError(f"{len(unlisted)} tensors are in no entry of {INDEX_FILE}, e.g. {unlisted[0]}.")
        return files

    def _json(self, name: str, otherwise: str) -> dict[str, Any]:
        try:
            values = json.loads((self.path / name).read_text())
        except FileNotFoundError as error:
            raise ModelFolderError(f"{self.path} has no {name}: {otherwise}.") from error
        except OSError as error:
            raise ModelFolderError(f"{self.path / name} cannot be read: {error}") from error
        except ValueError as error:
            raise ModelFolderError(f"{self.path / name} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelFolderError(f"{self.path / name} holds a {type(values).__name__}, not a table.")
        return values


def _find_quantized(format: Format, infos: Mapping[str, TensorInfo]) -> frozenset[str]:
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
