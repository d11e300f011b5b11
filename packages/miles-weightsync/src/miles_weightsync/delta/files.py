"""Whole files in a folder or an object store: a reader finds all of a file or none of it."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from typing import Any, cast

import fsspec  # pyright: ignore[reportMissingTypeStubs]
import xxhash
from fsspec.implementations.local import LocalFileSystem  # pyright: ignore[reportMissingTypeStubs]

from .errors import StoreError

TEMPORARY = ".tmp"


class Files:
    """Reads and writes below one root, given as a path or as a URL of any fsspec file system.

    In a local folder a file is written under another name, synced and renamed. Object stores show an object only when
    it is complete.
    """

    def __init__(self, url: str, *, filesystem: Any = None, **options: Any) -> None:
        if filesystem is None:
            find = cast("Callable[..., tuple[Any, str]]", fsspec.core.url_to_fs)  # pyright: ignore[reportUnknownMemberType]
            filesystem, root = find(url, **options)
        else:
            root = filesystem._strip_protocol(url)
        self._fs, self.root = filesystem, str(root).rstrip("/")
        self._is_local = isinstance(filesystem, LocalFileSystem)

    def write(self, path: str, data: bytes | memoryview, *, exclusive: bool = False) -> None:
        """Make `path` hold `data`.

        Raises:
            FileExistsError: it exists, and `exclusive` was asked for.
            StoreError: it cannot be written; nothing of it is left.
        """
        whole = self._at(path)
        try:
            if self._is_local:
                self._write_and_rename(whole, data, exclusive)
            else:
                self._fs.pipe_file(whole, bytes(data), mode="create" if exclusive else "overwrite")
        except FileExistsError:
            raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            advice = "Free space, or prune with fewer versions kept" if full else "Check the store"
            raise StoreError(f"{whole} ({len(data)} bytes) could not be written: {error}. {advice}.") from error

    def read(self, path: str) -> bytes:
        """Raises `FileNotFoundError`, or `StoreError` where it cannot be read."""
        try:
            return cast("bytes", self._fs.cat_file(self._at(path)))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"{self._at(path)} could not be read: {error}.") from error

    def size(self, path: str) -> int | None:
        """Bytes of `path`, None where it is not there."""
        self._fs.invalidate_cache()  # other processes write too
        try:
            return cast("int", self._fs.size(self._at(path)))
        except FileNotFoundError:
            return None

    def holds(self, path: str, *, nbytes: int, digest: str) -> bool:
        """Whether `path` is there with this size and content; the content is read back only where that is cheap."""
        if self.size(path) != nbytes:
            return False
        return not self._is_local or xxhash.xxh3_128_hexdigest(self.read(path)) == digest

    def names(self, folder: str) -> list[str]:
        """Names of the files and folders in `folder`; none where it does not exist."""
        whole = self._at(folder)
        self._fs.invalidate_cache()
        try:
            found = cast("list[str]", self._fs.ls(whole, detail=False))
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def remove(self, path: str) -> None:
        """Remove a file or folder that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def _write_and_rename(self, whole: str, data: bytes | memoryview, exclusive: bool) -> None:
        folder = whole.rpartition("/")[0]
        self._fs.makedirs(folder, exist_ok=True)
        temporary = f"{whole}.{uuid.uuid4().hex[:12]}{TEMPORARY}"
        try:
            with self._fs.open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if exclusive:
                os.link(temporary, whole)  # unlike a rename, fails where the name is taken
            else:
                self._fs.mv(temporary, whole)
            _sync_folder(folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
