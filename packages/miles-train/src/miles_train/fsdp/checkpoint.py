"""Checkpoints that are complete or absent, are written while training goes on, and load on any number of ranks.

begin ─▶ copy to host memory ─▶ training goes on
                └─▶ thread: <path>.partial/rank-N.safetensors ─▶ all ranks done ─▶ trainer.json ─▶ rename ─▶ <path>/
finish ─▶ waits for the thread, raises its error
"""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from miles_train.errors import CheckpointError

from .block_file import Block, BlockFile, file_bytes, write_blocks
from .folders import fresh_partial, replace_folder, write_synced
from .optimizer import Optimizer
from .ranks import Ranks
from .shards import Box, block_of

MANIFEST = "trainer.json"
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a checkpoint holds beside tensors."""

    version: int
    optimizer_steps: int


class CheckpointWriter:
    """Writes one checkpoint at a time behind the training of this rank.

    Its collectives run over a group of its own, so they meet neither those of training nor those of a push. The host
    copies are kept from one checkpoint to the next: fresh memory costs more than the copy.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Collective."""
        self._ranks = ranks.twin()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: dict[str, Tensor] = {}
        self._path: Path | None = None
        self._write: Future[None] | None = None

    def begin(self, path: Path, *, model: nn.Module, optimizer: Optimizer, progress: Progress, device: Any) -> None:
        """Copy everything to host memory and start to write it.

        Raises:
            CheckpointError: the checkpoint begun before has not been finished.
        """
        if self._write is not None:
            raise CheckpointError(f"The checkpoint {self._path} is still open; call finish_save() before the next one.")
        blocks = self._copy(model, optimizer, device)
        extra = {"random": _random_states()}
        self._path = path
        self._write = self._pool.submit(self._write_all, path, blocks, extra, progress)

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is durable; without effect where none was.

        Raises:
            CheckpointError: it could not be written, on whichever rank; nothing of it is left at its path.
        """
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def close(self) -> None:
        """Let a write that has begun come to its end, then leave the group."""
        self._pool.shutdown()
        self._ranks.close()

    def _copy(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> list[Block]:
        blocks: list[Block] = []
        for name, tensor in named_tensors(model, optimizer):
            box, block, is_shared = block_of(tensor, rank=self._ranks.rank, ranks=self._ranks.count)
            if block.numel() and (self._ranks.rank == 0 or not is_shared):
                blocks.append(Block(name, tuple(tensor.shape), box, self._host_copy(name, block)))
        for name, tensor in _torch_random_states(device).items():
            blocks.append(Block(name, tuple(tensor.shape), ((0, len(tensor)),), tensor))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return blocks

    def _host_copy(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._copies:
            on_gpu = tensor.device.type == "cuda"
            self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=on_gpu)
        return self._copies[name].copy_(tensor, non_blocking=True)

    def _write_all(self, path: Path, blocks: list[Block], extra: Mapping[str, Any], progress: Progress) -> None:
        ranks, name = self._ranks, f"rank-{self._ranks.rank}.safetensors"
        partial = path.with_name(path.name + ".partial")
        needed = sum(self._together(lambda: file_bytes(blocks, extra), path))

        def prepare() -> None:
            if ranks.rank == 0:
                fresh_partial(path)
                if (free := shutil.disk_usage(partial).free) < needed:
                    raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")

        def complete() -> None:
            if ranks.rank == 0:
                manifest = {
                    "format": FORMAT,
                    "version": progress.version,
                    "optimizer_steps": progress.optimizer_steps,
                    "files": {f"rank-{rank}.safetensors": size for rank, size in enumerate(sizes)},
                }
                write_synced(partial / MANIFEST, json.dumps(manifest, indent=2) + "\n")
                replace_folder(partial, path)

        try:
            self._together(prepare, path)
            sizes = self._together(lambda: write_blocks(partial / name, blocks, extra), path)
            self._together(complete, path)
        except CheckpointError:
            if ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _together(self, act: Callable[[], T], path: Path) -> list[T]:
        """[ranks] what `act` returns on each; an error of one is an error on all, for the others wait for it."""
        result: T | None = None
        error: str | None = None
        try:
            result = act()
        except Exception as caught:  # the boundary of this thread: the other ranks have to hear of it
            error = f"rank {self._ranks.rank}: {type(caught).__name__}: {caught}"
        try:
            answers: list[tuple[Any, str | None]] = self._ranks.gather((result, error))
        except RuntimeError as gone:
            answers = [(result, error or f"rank {self._ranks.rank}: another rank is gone: {gone}")]
        if errors := [error for _, error in answers if error is not None]:
            free = shutil.disk_usage(_existing(path)).free
            raise CheckpointError(
                f"The checkpoint {path} could not be written ({'; '.join(errors)}). Its disk has {free:,} bytes free. "
                "Checkpoints written before are untouched."
            )
        return [value for value, _ in answers]


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> Progress:
    """Read a checkpoint into the model and the optimizer; it may come from another number of ranks.

    Raises:
        CheckpointError: it is absent, incomplete, or of another model; nothing has been changed.
    """
    progress, names = _read_manifest(path)
    files = [BlockFile(path / name) for name in names]
    wanted = dict(named_tensors(model, optimizer))
    stored = {name: shape for file in files for name, shape in file.shapes().items()}
    _check_tensors(wanted, stored, path)
    with torch.no_grad():
        for name, tensor in wanted.items():
            box, block, _ = block_of(tensor, rank=ranks.rank, ranks=ranks.count)
            _fill(block, name, box, files)
    if ranks.rank < len(files):  # a rank that the checkpoint has no state for keeps its own
        _set_random_states(files[ranks.rank], ranks.device)
    return progress


def named_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Everything that training changes, and the persistent buffers."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"model.{name}", buffer
    for name, tensor in optimizer.named_state():
        yield f"optimizer.{name}", tensor


def _fill(block: Tensor, name: str, box: Box, files: list[BlockFile]) -> None:
    found = sum(file.copy_into(block, name, box) for file in files) if block.numel() else 0
    if found != block.numel():
        raise CheckpointError(f"The checkpoint holds {found} of the {block.numel()} values of {name} at {box}.")


def _random_states() -> dict[str, Any]:
    """The generators of Python and numpy, for losses that draw from them."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _torch_random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


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


def _check_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
    stored = {name for name in found if not name.startswith("random.")}
    missing, extra = sorted(wanted.keys() - stored), sorted(stored - wanted.keys())
    if missing or extra:
        raise CheckpointError(
            f"The checkpoint {path} is of another model: it lacks {len(missing)} tensors (first {missing[:2]}) and has "
            f"{len(extra)} that this model lacks (first {extra[:2]})."
        )
    for name, tensor in wanted.items():
        if found[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"The checkpoint {path} is of another model: {name} has shape {found[name]}, not {tuple(tensor.shape)}."
            )


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())
