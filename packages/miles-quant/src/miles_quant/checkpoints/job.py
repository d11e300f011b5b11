"""One model folder made from another, tensor by tensor, resumable: the frame of `convert` and `dequantize`.

    source file ─ read one tensor ─ transform ─ append to target file.partial ─┐   one thread a file,
                        ▲                                                      │   `workers` at a time
                        └──────────────────────────────────────────────────────┘
    all files whole ─> index ─> other files ─> config.json ─> progress file removed

A folder is complete when its progress file is gone; until then no reader of this package accepts it, and it has no
config.json for an engine to find.
"""

from __future__ import annotations

import itertools
import json
import shutil
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelFolderError
from ..recipe.hf import MODELOPT_FILE, RECIPE_FILE
from .files import SUFFIX, partial_of, write_json
from .folder import INDEX_FILE, PROGRESS_FILE, ModelFolder
from .progress import ProgressLine
from .safetensors import TensorInfo, TensorWriter

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", SUFFIX}
_REPLACED = {"config.json", INDEX_FILE, RECIPE_FILE, MODELOPT_FILE, PROGRESS_FILE}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """What a conversion wrote, in numbers."""

    path: Path
    num_tensors: int
    num_changed: int
    """Matrices that were quantised or dequantised."""
    source_bytes: int
    target_bytes: int
    resumed_bytes: int
    """Of `target_bytes`, what an earlier run had written."""


_Plan = dict[str, dict[str, TensorInfo]]
"""Of one file: tensors of the source in order, and what each becomes."""


class FolderJob(ABC):
    """Writes a model folder from another one; a subclass says what each tensor becomes.

    `convert` and `dequantize` make one and call `run` once.
    """

    def __init__(self, source: ModelFolder, *, title: str, changed: frozenset[str]) -> None:
        self.source = source
        self.changed = changed
        self._title = title

    @abstractmethod
    def targets(self, name: str) -> dict[str, TensorInfo]:
        """What the tensor `name` of the source becomes, without reading it; empty if others bring it along."""

    @abstractmethod
    def transform(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of `targets(name)`."""

    @abstractmethod
    def documents(self) -> dict[str, dict[str, Any]]:
        """JSON files of the target by name, config.json last."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What is recorded beside the unfinished target: only a run with the same record goes on with it."""

    def run(self, target: str | Path, *, workers: int = 1, is_quiet: bool = False) -> FolderReport:
        """Write the folder `target`, or the rest of it.

        Raises:
            ModelFolderError: `target` exists and is not this job's unfinished work, or it cannot be written.
        """
        if workers < 1:
            raise ModelFolderError(f"`workers` is {workers}; at least one is needed.")
        try:
            return self._run(Path(target), workers=workers, is_quiet=is_quiet)
        except OSError as error:
            raise ModelFolderError(
                f"{target} cannot be written: {error}. What is there already stays: once the cause is gone, the same "
                "command goes on from it."
            ) from error

    def _run(self, target: Path, *, workers: int, is_quiet: bool) -> FolderReport:
        plans = {file: {name: self.targets(name) for name in held.infos} for file, held in self.source.files.items()}
        self._begin(target)
        total = sum(info.num_bytes for plan in plans.values() for info in _flat(plan).values())
        progress = ProgressLine(self._title, total=total, is_quiet=is_quiet)
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // workers))
        try:
            with ThreadPoolExecutor(workers) as pool:
                jobs = [pool.submit(self._write_file, target / file, plan, progress) for file, plan in plans.items()]
                for job in jobs:
                    job.result()
        finally:
            torch.set_num_threads(threads)
        self._finish(target, plans, total)
        return FolderReport(
            path=target,
            num_tensors=len(self.source.infos),
            num_changed=len(self.changed),
            source_bytes=sum(info.num_bytes for info in self.source.infos.values()),
            target_bytes=total,
            resumed_bytes=progress.found,
        )

    def _begin(self, target: Path) -> None:
        """Make the target with its progress file, or check that the one there is of this job."""
        mine = {"source": str(self.source.path.resolve()), "digest": self.source.digest, **self.identity()}
        progress = target / PROGRESS_FILE
        if progress.exists():
            try:
                theirs = json.loads(progress.read_text())
            except ValueError:
                theirs = None
            if not isinstance(theirs, dict):
                raise ModelFolderError(f"{progress} is damaged; remove {target} or choose another folder.")
            if theirs != mine:
                differs = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
                raise ModelFolderError(
                    f"{target} holds the unfinished work of another job (other {', '.join(differs)}); remove it or "
                    "choose another folder."
                )
        elif target.exists() and (not target.is_dir() or set(target.iterdir()) - {partial_of(progress)}):
            raise ModelFolderError(f"{target} exists and is not an empty folder; remove it or choose another.")
        else:
            target.mkdir(parents=True, exist_ok=True)
            write_json(progress, mine)

    def _write_file(self, path: Path, plan: _Plan, progress: ProgressLine) -> None:
        infos = _flat(plan)
        if path.exists() or not infos:
            progress.start_at(sum(info.num_bytes for info in infos.values()))
            return
        with TensorWriter(path, infos, self.source.files[path.name].metadata) as writer:
            skip = writer.done
            progress.start_at(sum(info.num_bytes for info in itertools.islice(infos.values(), skip)))
            for name, targets in plan.items():
                remaining = list(targets)[skip:]
                skip = max(0, skip - len(targets))
                if not remaining:
                    continue
                tensors = self.transform(name)
                for part in remaining:
                    writer.write(part, tensors[part])
                progress.add(sum(targets[part].num_bytes for part in remaining))

    def _finish(self, target: Path, plans: dict[str, _Plan], total: int) -> None:
        if (self.source.path / INDEX_FILE).exists():
            weight_map = {name: file for file, plan in plans.items() for name in _flat(plan)}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(target / INDEX_FILE, index)
        for file in self.source.path.iterdir():
            if file.is_file() and file.suffix not in _NOT_COPIED and file.name not in _REPLACED:
                shutil.copy2(file, target / file.name)
        for name, document in self.documents().items():
            write_json(target / name, document)
        (target / PROGRESS_FILE).unlink()


def _flat(plan: _Plan) -> dict[str, TensorInfo]:
    return {name: info for targets in plan.values() for name, info in targets.items()}
