"""Control messages between the leader of a push, receivers in engines, and other trainer ranks: JSON over a socket."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any, cast

Message = dict[str, Any]
"""A JSON object; `op` says what it asks for."""

_HEAD = struct.Struct("!I")
_MAX_BYTES = 1 << 30


class ConnectionLost(Exception):
    """The other end is gone, or sent something that is no message."""


class Channel:
    """One connection. Any thread may send; one at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, *, timeout_s: float) -> Channel:
        """Raises OSError when nobody answers."""
        return cls(socket.create_connection((host, port), timeout=timeout_s))

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""
        data = json.dumps(message).encode()
        try:
            with self._sending:
                self._socket.sendall(_HEAD.pack(len(data)) + data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message.

        Raises:
            ConnectionLost: there will be none.
            TimeoutError: it did not come in time; the connection is of no more use then, a part may have been read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        if length > _MAX_BYTES:
            raise ConnectionLost(f"a message of {length} bytes was announced; more than {_MAX_BYTES} is no message")
        try:
            found: object = json.loads(self._exactly(length, deadline))
        except ValueError as error:
            raise ConnectionLost(f"what came is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConnectionLost("what came is no JSON object")
        return cast(Message, found)

    @property
    def local_host(self) -> str:
        """This end's address, which whoever is at the other end can reach."""
        return str(self._socket.getsockname()[0])

    @property
    def is_closed(self) -> bool:
        """Whether the other end has gone; no message may be on its way."""
        try:
            ready = select.poll()
            ready.register(self._socket, select.POLLIN | select.POLLHUP)
            # Asked first: with a timeout set, Python's recv waits in spite of MSG_DONTWAIT.
            return bool(ready.poll(0)) and self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in `receive`
        self._socket.close()

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("no message in time")
                self._socket.settimeout(left)
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except TimeoutError:
                raise
            except (OSError, ValueError) as error:
                raise ConnectionLost(str(error)) from error
            if not part:
                raise ConnectionLost("the other end closed the connection")
            parts += part
        return bytes(parts)
