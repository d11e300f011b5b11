"""Ports of this machine."""

from __future__ import annotations

import socket
from typing import Self
from urllib.parse import urlsplit


class PortReservation:
    """A port that nobody else is given while this object is open.

    It is bound but does not listen. With SO_REUSEADDR on both sides Linux lets a server bind and listen on it all the
    same, while the kernel hands it neither to other callers that ask for any port nor to outgoing connections. The
    usual way, to close the socket before the server starts, leaves the ten seconds of an engine's start for somebody
    else to take it.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """
        Args:
            port: 0 for any that is free.

        Raises:
            OSError: it is taken.
        """
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, and may be taken by another a moment later."""
    with PortReservation(host) as reservation:
        return reservation.port


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` now."""
    try:
        with PortReservation(host, port):
            return True
    except OSError:
        return False


def port_of(url: str) -> int:
    """The port that a URL means, written there or not."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
