"""Memory that threads of the receiver fill from connections, and how that is ended."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator

from ..errors import TransportError
from .base import Bytes
from .links import hang_up


class Memory:
    """One registration: the bytes, the connections that write to them, and whether any still may."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._num_filling = 0
        self._is_over = False

    @contextlib.contextmanager
    def connected(self, connection: socket.socket) -> Generator[None]:
        with self._changed:
            self._check()
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._connections.discard(connection)

    @contextlib.contextmanager
    def filling(self) -> Generator[None]:
        with self._changed:
            self._check()
            self._num_filling += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_filling -= 1
                self._changed.notify_all()

    def refuse(self) -> None:
        """Let nobody write any more: a read that waits for bytes ends too."""
        with self._changed:
            self._is_over = True
            for connection in self._connections:
                hang_up(connection)

    def shut_out(self, timeout_s: float) -> bool:
        """Refuse, and return when the last read has ended; False when it has not in time."""
        self.refuse()
        with self._changed:
            return self._changed.wait_for(lambda: self._num_filling == 0, timeout_s)

    def _check(self) -> None:
        if self._is_over:
            raise TransportError("this region takes no writes any more: sealed, fenced off or released")
