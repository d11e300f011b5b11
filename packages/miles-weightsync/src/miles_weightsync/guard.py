"""At most one push at a time on an engine, from whatever process of this host."""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from .errors import SyncError
from .urls import server


@contextmanager
def exclusive(urls: Sequence[str]) -> Generator[None]:
    """Hold the engines for one push.

    The lock is an abstract Unix socket: it has no file to leave behind and the kernel drops it with the process.

    Raises:
        SyncError: another push holds one of them.
    """
    with ExitStack() as stack:
        for name, url in {server(url): url for url in urls}.items():
            lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                lock.bind(f"\0miles-weightsync/{hashlib.sha256(name.encode()).hexdigest()}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise SyncError(
                    f"Another push to {url} is running. Pushes to one engine must follow one another; wait for it.",
                    phase="prepare",
                ) from None
        yield
