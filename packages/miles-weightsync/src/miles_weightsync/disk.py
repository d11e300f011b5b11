"""The second way: a safetensors folder that the ranks write together and the engines load.

```
 .tmp-version_000012/   every rank copies its boxes into the mapped files
 version_000012/        renamed when all is on disk: a folder with this name is complete
```
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from .buckets import Bucket
from .errors import StagingError

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_HEADER_ALIGN = 64
_VERSION_FOLDER = re.compile(r"version_\d{6,}")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class MappedFile:
    """One safetensors file of the new version, mapped by a rank that writes into it."""

    def __init__(self, path: Path, bucket: Bucket, *, create: bool) -> None:
        header = _header(bucket)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)
        try:
            if create:
                _reserve(fd, path, len(header) + bucket.nbytes)
                os.pwrite(fd, header, 0)
            self._memory = mmap.mmap(fd, len(header) + bucket.nbytes)
        finally:
            os.close(fd)
        self._data: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8, offset=len(header))

    @property
    def data(self) -> torch.Tensor:
        """[bucket.nbytes] uint8, the tensors of the file."""
        assert self._data is not None, "the file is closed"
        return self._data

    def close(self) -> None:
        """Write what this rank changed to the disk."""
        self._memory.flush()
        self._data = None


class VersionFolder:
    """The folder of one version while it is being written."""

    def __init__(self, root: str, version: int) -> None:
        self.final = Path(root).absolute() / f"version_{version:06d}"
        self._draft = self.final.with_name(f".tmp-{self.final.name}")

    def start(self) -> None:
        """Leader: make an empty folder, removing what an earlier failed push left."""
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)

    def open(self, bucket: Bucket, num_buckets: int, *, create: bool) -> MappedFile:
        return MappedFile(self._draft / _file_name(bucket.index, num_buckets), bucket, create=create)

    def publish(self, buckets: Sequence[Bucket], template: str | None) -> None:
        """Leader: add the index and the template's small files, then give the folder its name."""
        if template is not None:
            _copy_small_files(Path(template), self._draft)
        weight_map = {slot.name: _file_name(b.index, len(buckets)) for b in buckets for slot in b.slots}
        total = sum(slot.nbytes for bucket in buckets for slot in bucket.slots)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._draft / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        _sync(self._draft)
        if self.final.exists():  # the same version again
            shutil.rmtree(self.final)
        self._draft.rename(self.final)
        _sync(self.final.parent)

    def discard(self) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self._draft, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` versions."""
        versions = [p for p in self.final.parent.iterdir() if p.is_dir() and _VERSION_FOLDER.fullmatch(p.name)]
        for old in sorted(versions, key=lambda path: int(path.name.removeprefix("version_")))[:-keep]:
            shutil.rmtree(old)


def _header(bucket: Bucket) -> bytes:
    entries = {
        slot.name: {
            "dtype": _safetensors_dtype(slot.dtype),
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.stop],
        }
        for slot in bucket.slots
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def _safetensors_dtype(dtype: str) -> str:
    if dtype not in _SAFETENSORS_DTYPES:
        raise StagingError(f"Tensors of type {dtype} cannot be stored in safetensors; use `way = tensor`.")
    return _SAFETENSORS_DTYPES[dtype]


def _reserve(fd: int, path: Path, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full disk must be an error here, not a SIGBUS while writing
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(path.parent).free
        raise StagingError(
            f"{path.parent} has {free} bytes free, {path.name} needs {nbytes}. Free some, lower `disk_keep`, "
            "or point `disk_dir` elsewhere."
        ) from None


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _copy_small_files(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise StagingError(f"`disk_template` {source} is not a folder.")
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copy2(path, target / path.name)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
