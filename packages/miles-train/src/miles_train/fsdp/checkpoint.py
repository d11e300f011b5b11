"""Checkpoints that are complete or absent, and load on any number of ranks.

<path>.partial/  shards of every rank ─▶ trainer.json ─▶ rename ─▶ <path>/
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from miles_train.errors import CheckpointError

from .optimizer import Optimizer
from .ranks import Ranks

MARKER = "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a checkpoint holds beside tensors."""

    version: int
    optimizer_steps: int


def save_checkpoint(
    path: str | Path, *, model: nn.Module, optimizer: Optimizer, progress: Progress, ranks: Ranks
) -> None:
    """Write weights, moments, random states and progress; `path` appears only when all of it is on disk."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that died while saving
        partial.mkdir(parents=True)
    ranks.barrier()
    state = _tensors(model, optimizer) | _random_states(ranks)
    with _single_rank_is_meant():
        save(
            state,
            storage_writer=FileSystemWriter(partial, sync_files=True),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    if ranks.rank == 0:
        _write_synced(partial / MARKER, json.dumps(asdict(progress)))
        replace_folder(partial, path)
    ranks.barrier()


def load_checkpoint(path: str | Path, *, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Progress:
    """Read a checkpoint into the model and the optimizer; it may come from another number of ranks."""
    path = Path(path)
    progress = _read_progress(path)
    reader = FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    state = _tensors(model, optimizer)
    _check_tensors(state, found, path)
    state |= {name: value for name, value in _random_states(ranks).items() if name in found}
    with _single_rank_is_meant():
        load(state, storage_reader=reader, process_group=ranks.group, no_dist=ranks.group is None)
    _set_random_states(state, ranks)
    return progress


def replace_folder(new: Path, path: Path) -> None:
    """Put a finished folder in place of `path`; a crash in between leaves the old or the new one under a plain name."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _single_rank_is_meant() -> Iterator[None]:
    """Torch warns on every save and load without a process group, `no_dist` or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    buffers = {f"model.{name}": b for name, b in model.named_buffers() if name in model.state_dict()}
    return weights | buffers | {f"optimizer.{name}": tensor for name, tensor in optimizer.named_state()}


def _random_states(ranks: Ranks) -> dict[str, Tensor]:
    states = {f"random.cpu.{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"random.cuda.{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _set_random_states(state: dict[str, Any], ranks: Ranks) -> None:
    """A rank that the checkpoint has no state for keeps its own."""
    if (cpu := state.get(f"random.cpu.{ranks.rank}")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := state.get(f"random.cuda.{ranks.rank}")) is not None:
        torch.cuda.set_rng_state(cuda, ranks.device)


def _read_progress(path: Path) -> Progress:
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        return Progress(**json.loads((path / MARKER).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint {path} is incomplete: {MARKER} cannot be read ({error}). Load an older one."
        ) from error


def _check_tensors(state: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    stored = {name for name in found if not name.startswith("random.")}
    missing, extra = sorted(state.keys() - stored), sorted(stored - state.keys())
    if missing or extra:
        raise CheckpointError(
            f"The checkpoint {path} is of another model: it lacks {len(missing)} tensors (first {missing[:2]}) and has "
            f"{len(extra)} that this model lacks (first {extra[:2]})."
        )
    for name, tensor in state.items():
        shape, wanted = tuple(found[name].size), tuple(tensor.shape)
        if shape != wanted:
            raise CheckpointError(f"The checkpoint {path} is of another model: {name} has shape {shape}, not {wanted}.")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
