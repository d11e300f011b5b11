"""A Hugging Face model folder: its configuration and its tensors, wherever among its files they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelFolderError
from ..recipe.hf import MODELOPT_FILE, RECIPE_FILE, recipe_of_config
from ..recipe.recipe import Recipe
from .safetensors import TensorFile, TensorInfo

INDEX_FILE = "model.safetensors.index.json"
PROGRESS_FILE = "miles_quant.progress.json"


class ModelFolder:
    """A Hugging Face model folder opened for reading; everything that converts, compares or loads one starts here.

    The whole folder is checked when it is opened. `infos` describes every tensor by name, in the order of the files.

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

    @property
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
