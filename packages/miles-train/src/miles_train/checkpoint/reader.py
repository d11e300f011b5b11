"""Loads a checkpoint into whatever a rank holds, also one of another number of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from miles_train.errors import CheckpointError
from miles_train.ranks import Ranks

from .block_file import Block, BlockFile
from .writer import FORMAT, MANIFEST, Progress


def load_checkpoint(path: Path, blocks: Iterable[Block], *, ranks: Ranks) -> Progress:
    """Read a checkpoint into this rank's tensors; it may come from another number of ranks.

    Args:
        blocks: every tensor that the model and its optimizer have, and what this rank holds of it, to be filled.

    Raises:
        CheckpointError: it is absent, incomplete, or of another model; nothing has been changed.
    """
    progress, names = _read_manifest(path)
    files = [BlockFile(path / name) for name in names]
    wanted = {block.name: block for block in blocks}
    stored = {name: shape for file in files for name, shape in file.shapes().items()}
    _check_tensors(wanted, stored, path)
    with torch.no_grad():
        for block in wanted.values():
            _fill(block, files)
    if ranks.rank < len(files):  # a rank that the checkpoint has no state for keeps its own
        _set_random_states(files[ranks.rank], ranks.device)
    return progress


def _fill(block: Block, files: list[BlockFile]) -> None:
    target = block.tensor
    found = sum(file.copy_into(target, block.name, block.box) for file in files) if target.numel() else 0
    if found != target.numel():
        raise CheckpointError(
            f"The checkpoint holds {found} of the {target.numel()} values of {block.name} at {block.box}."
        )


def _set_random_states(file: BlockFile, device: torch.device) -> None:
    version, keys, gauss = file.extra["random"]["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(file.extra["random"]["numpy"]))
    if (cpu := file.get("random.cpu")) is not None:
        torch.set_rng_state(cpu)
    if device.type == "cuda" and (cuda := file.get("random.cuda")) is not None:
        torch.cuda.set_rng_state(cuda, device)


def _read_manifest(path: Path) -> tuple[Progress, list[str]]:
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        known = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        kind, files = known["format"], known["files"]
        progress = Progress(version=known["version"], optimizer_steps=known["optimizer_steps"])
        sizes = {name: (path / name).stat().st_size for name in files}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"The checkpoint {path} is incomplete: {MANIFEST} or a file that it lists cannot be read ({error}). Load "
            "an older one."
        ) from error
    if kind != FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} has format {kind}; this version of miles-train reads format {FORMAT}."
        )
    for name, size in files.items():
        if sizes[name] != size:
            raise CheckpointError(
                f"The checkpoint {path} is incomplete: {name} has {sizes[name]:,} bytes of {size:,}. Load an older one."
            )
    return progress, list(files)


def _check_tensors(wanted: Mapping[str, Block], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    stored = {name for name in found if not name.startswith("random.")}
    missing, extra = sorted(wanted.keys() - stored), sorted(stored - wanted.keys())
    if missing or extra:
        raise CheckpointError(
            f"The checkpoint {path} is of another model: it lacks {len(missing)} tensors (first {missing[:2]}) and has "
            f"{len(extra)} that this model lacks (first {extra[:2]})."
        )
    for name, block in wanted.items():
        if found[name] != block.global_shape:
            raise CheckpointError(
                f"The checkpoint {path} is of another model: {name} has shape {found[name]}, not {block.global_shape}."
            )
