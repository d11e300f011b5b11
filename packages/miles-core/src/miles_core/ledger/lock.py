"""One writer at a time: a second `miles resume` of a run that lives must not get far."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .errors import LedgerError


class OneWriter:
    """Holds `<ledger>.lock` as long as this process lives; the kernel lets go of it, `kill -9` included.

    Raises:
        LedgerError: another process holds it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LedgerError(f"{path} cannot be opened for writing: {error}.") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise LedgerError(
                f"{path.parent} is in use: process {holder} runs it. Stop that one first, or wait for its end."
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
