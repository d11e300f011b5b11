"""The model folder of a run: given, or built into the run directory."""

from __future__ import annotations

import json
from pathlib import Path

from miles_tito.errors import MilesError

from .config import ModelConfig
from .importing import call


class ModelError(MilesError, ValueError):
    """There is no usable model folder."""


def prepare_model_folder(config: ModelConfig, *, out: Path) -> Path:
    """`model.path` as it is, or what `model.builder` makes: at `out`, unless it returns another folder such as a cache.

    Raises:
        ModelError: the folder lacks `config.json`.
    """
    if config.path is not None:
        folder = Path(config.path).expanduser()
    else:
        made = call(str(config.builder), out, keywords=config.builder_args, what="model.builder")
        folder = out if made is None else Path(made)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is no Hugging Face model folder: it has no config.json. Set `model.path` to one, or "
            "`model.builder` to a function that makes one."
        )
    return folder.resolve()


def context_limit(config: ModelConfig, folder: Path) -> int:
    """Most tokens of a conversation: `model.max_context`, else what the model's own config allows.

    Raises:
        ModelError: `model.max_context` is above what the model was made for, or neither says a number.
    """
    own = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if config.max_context is None:
        if own is None:
            raise ModelError(f"{folder}/config.json has no max_position_embeddings; set `model.max_context`.")
        return int(own)
    if own is not None and config.max_context > own:
        raise ModelError(f"`model.max_context` is {config.max_context} but {folder.name} was made for {own} positions.")
    return config.max_context
