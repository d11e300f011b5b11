"""The trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from miles_train.checkpoint.folders import fresh_partial, replace_folder
from miles_train.ranks import Ranks

from .model import no_progress_bars

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
"""What belongs to a tokenizer in a Hugging Face folder."""


def export_model(path: str | Path, lm: Any, *, source: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    """Gather the weights on rank 0 and write config, safetensors and the tokenizer files of `source`.

    The folder appears at `path` only when it is complete.
    """
    path = Path(path)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        whole = _whole(tensor.detach())  # collective: every rank takes part, one weight at a time
        if ranks.rank == 0:
            weights[name] = whole.to("cpu", dtype if whole.is_floating_point() else whole.dtype)
    if ranks.rank == 0:
        _write(path, lm, weights, source=source, dtype=dtype)
    ranks.barrier()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write(path: Path, lm: Any, weights: dict[str, torch.Tensor], *, source: Path, dtype: torch.dtype) -> None:
    partial = fresh_partial(path)
    with no_progress_bars():
        lm.save_pretrained(partial, state_dict=weights, max_shard_size="5GB")
    _set_dtype(partial / "config.json", dtype)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, partial / file.name)
    replace_folder(partial, path)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """The weights may be narrower than the model that they come from."""
    config = json.loads(config_file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n")
