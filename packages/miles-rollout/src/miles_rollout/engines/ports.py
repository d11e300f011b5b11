"""Local ports: choosing one that stays ours until the server has it."""

from __future__ import annotations

import socket
import time
from types import TracebackType

from miles_rollout.engines.errors import EngineStartError

POLL_S = 0.05


class PortReservation:
    """A port that nobody else is given while this object is open.

    It is bound but does not listen. With SO_REUSEADDR on both sides Linux lets a server bind and listen on it all the
    same, while the kernel hands it neither to other callers that ask for any port nor to outgoing connections. The
    usual way, to close the socket before the server starts, leaves the ten seconds of an engine's start for somebody
    else to take it.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
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

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reserve(host: str, port: int = 0, *, wait_s: float = 10.0) -> PortReservation:
    """A reservation of `port`, which may still belong for a moment to the dead server that is started again there.

    Raises:
        EngineStartError: it is still taken after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return PortReservation(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"Port {port} of {host} cannot be had: {error}. End what listens there, or choose another."
                ) from error
        time.sleep(POLL_S)


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` now."""
    try:
        with PortReservation(host, port):
            return True
    except OSError:
        return False
