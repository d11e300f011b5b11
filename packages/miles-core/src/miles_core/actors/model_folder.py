"""The model folder of a run: given, or built into the run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from miles_tito.errors import MilesError
from miles_tito.shared.plugins import call

from miles_core.config import ModelConfig


class ModelError(MilesError, ValueError):
    """There is no usable model folder."""


def prepare_model_folder(config: ModelConfig, *, out: Path) -> Path:
    """`model.path` as it is, or what `model.builder` makes: at `out`, unless it returns another folder such as a cache.

    What an earlier start of the run has made at `out` is taken as it is; it appears there only when it is whole.

    Raises:
        ModelError: the folder lacks `config.json`.
    """
    given = None if config.path is None else Path(config.path).expanduser()
    folder = given or (out if out.is_dir() else _build(config, out))
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is no Hugging Face model folder: it has no config.json. Set `model.path` to one, or "
            "`model.builder` to a function that makes one."
        )
    return folder.resolve()


def _build(config: ModelConfig, out: Path) -> Path:
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed before it was done
    made = call(str(config.builder), partial, keywords=config.builder_args, what="model.builder")
    if made is not None and Path(made) != partial:
        return Path(made)
    if not (partial / "config.json").is_file():
        return partial  # no model: the caller says what it lacks
    partial.rename(out)
    return out


def context_limit(config: ModelConfig, folder: Path, *, token_budget: int) -> int:
    """Most tokens of a conversation: `model.max_context`, else what the model's own config allows.

    Args:
        token_budget: most tokens of a micro-batch; a full conversation has to fit.

    Raises:
        ModelError: `model.max_context` is above what the model was made for, neither says a number, or the number is
            above the budget.
    """
    own = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    limit = own if config.max_context is None else config.max_context
    if limit is None:
        raise ModelError(f"{folder}/config.json has no max_position_embeddings; set `model.max_context`.")
    if own is not None and limit > own:
        raise ModelError(f"`model.max_context` is {limit} but {folder.name} was made for {own} positions.")
    if limit > token_budget:
        raise ModelError(
            f"A conversation may take {limit} tokens but `train.token_budget` is {token_budget}, and a full one must "
            f"fit into one micro-batch. Set `model.max_context` to at most {token_budget}, or raise the budget."
        )
    return int(limit)
