"""Checkpoints that are complete or absent, written while training goes on; whichever backend holds the tensors.

begin ─▶ copy to host memory ─▶ training goes on
                └─▶ thread: <path>.partial/rank-N.safetensors ─▶ all ranks done ─▶ trainer.json ─▶ rename ─▶ <path>/
finish ─▶ waits for the thread, raises its error
"""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from miles_tito.shared.files import write_atomic
from torch import Tensor

from miles_train.errors import CheckpointError
from miles_train.ranks import Ranks

from .block_file import Block, file_bytes, write_blocks
from .folders import fresh_partial, replace_folder

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

    def begin(self, path: Path, blocks: Iterable[Block], *, progress: Progress, device: torch.device) -> None:
        """Copy everything to host memory and start to write it.

        Args:
            blocks: what this rank is to write, in whatever memory; over all ranks they tile each tensor.
            device: the rank's own, whose random state is kept as well.

        Raises:
            CheckpointError: the checkpoint begun before has not been finished.
        """
        if self._write is not None:
            raise CheckpointError(f"The checkpoint {self._path} is still open; call finish_save() before the next one.")
        copies = self._copy(blocks, device)
        extra = {"random": _random_states()}
        self._path = path
        self._write = self._pool.submit(self._write_all, path, copies, extra, progress)

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

    def _copy(self, blocks: Iterable[Block], device: torch.device) -> list[Block]:
        copies = [block._replace(tensor=self._host_copy(block.name, block.tensor)) for block in blocks]
        for name, tensor in _torch_random_states(device).items():
            copies.append(Block(name, tuple(tensor.shape), ((0, len(tensor)),), tensor))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return copies

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
                write_atomic(partial / MANIFEST, json.dumps(manifest, indent=2) + "\n", durable=True)
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


def _random_states() -> dict[str, Any]:
    """The generators of Python and numpy, for losses that draw from them."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _torch_random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _existing(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())
