"""Locks between processes of one machine."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import Self


class FileLock:
    """A lock on a file, for as long as this object and its process live.

    The kernel releases it when the process dies, `kill -9` included, so none is ever stale. What the file holds is
    its owner's to write.
    """

    def __init__(self, path: Path, *, shared: bool = False, create: bool = True, wait: bool = False) -> None:
        """
        Args:
            shared: together with others that ask for a shared one.
            create: the file, where there is none.
            wait: for whoever has it, instead of raising.

        Raises:
            BlockingIOError: another process has it.
            OSError: the file cannot be opened.
        """
        access = os.O_RDONLY if shared else os.O_RDWR  # NFS wants a writable descriptor for an exclusive lock
        descriptor = os.open(path, access | (os.O_CREAT if create else 0), 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
