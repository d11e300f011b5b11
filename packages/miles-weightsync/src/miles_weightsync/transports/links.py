"""Authenticated TCP connections to a receiver: who may connect, and how a connection ends.

```
 sender                                receiver
 connect ────────────────────────────▶ accept
         ◀──────────────── 16 bytes ── nonce
 HMAC(token, nonce), region, epoch ──▶ compare, look the region up
         ◀── status, length, text ──── go on, or why not
```

The token travels in the region's address, over the caller's own channel, and never on these connections. They are not
encrypted: weights on an untrusted network need a tunnel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from ..errors import TransportError
from .base import Region

_CLAIM = struct.Struct("!32sQQ")
"""Proof, region, epoch."""
_REPLY = struct.Struct("!BH")
"""0 for good, length of the text that follows."""
_HANDSHAKE_S = 10.0
_GIVE_UP_MS = 30_000
"""A peer whose host is gone is given up after this long without an acknowledgement."""


class Listener:
    """Takes connections and hands each that proves the token to `serve`, on a thread of its own.

    Args:
        host: address to listen on, which senders are told.
        serve: gets the socket, the region and the epoch that the sender wants; raises TransportError to refuse. It
            must not return before it has called `reply`, and the socket is closed when it returns.
    """

    def __init__(self, host: str, port: int, *, name: str, serve: Callable[[socket.socket, int, int], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise TransportError(f"Cannot listen on {host}, port {port}: {error.strerror}.") from None
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._serve = serve
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._name = name
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            opened = dict(self._open)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        self._thread.join()
        self._socket.close()
        for connection in opened:
            hang_up(connection)
        for thread in opened.values():
            if thread is not threading.current_thread():
                thread.join()

    def _accept(self) -> None:
        pause = threading.Event()
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                pause.wait(0.1)  # out of file descriptors: the sender waits in the backlog until some are free
                continue
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-in", daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._open[connection] = thread
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(16)
            connection.sendall(nonce)
            proof, region, epoch = _CLAIM.unpack(receive(connection, _CLAIM.size))
            if not hmac.compare_digest(proof, _proof(self.token, nonce)):
                raise TransportError("the token is wrong")
            keep_alive(connection)
            self._serve(connection, region, epoch)
        except TransportError as error:
            with contextlib.suppress(OSError):
                reply(connection, str(error))
        except OSError:
            pass  # the sender went away; it knows why
        finally:
            with self._lock:
                self._open.pop(connection, None)
            connection.close()


def dial(region: Region, *, buffer_bytes: int, id: int, opened: Callable[[socket.socket], None]) -> socket.socket:
    """Connect to the receiver of a region.

    Args:
        opened: is given the socket before it connects, to `hang_up` from another thread.

    Raises:
        TransportError: nobody listens there, or the receiver refuses; says why.
    """
    host, port = region.text("host"), region.number("port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened(connection)
            set_buffers(connection, buffer_bytes)
            connection.settimeout(_HANDSHAKE_S)
            connection.connect((host, port))
            keep_alive(connection)
            connection.settimeout(_HANDSHAKE_S)
            proof = _proof(region.text("token"), receive(connection, 16))
            connection.sendall(_CLAIM.pack(proof, id, region.epoch))
            read_reply(connection)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
    except (OSError, OverflowError, struct.error) as error:  # the last two: an address that cannot be one
        raise TransportError(f"no connection to its receiver at {host}, port {port} ({describe(error)})") from None
    return connection


def reply(connection: socket.socket, problem: str = "") -> None:
    """Tell the sender that all is well, or what is not."""
    text = problem.encode()[:4096]
    connection.sendall(_REPLY.pack(int(bool(problem)), len(text)) + text)


def read_reply(connection: socket.socket) -> None:
    """Raises TransportError with the receiver's words when it refuses."""
    is_bad, length = _REPLY.unpack(receive(connection, _REPLY.size))
    text = receive(connection, length).decode(errors="replace")
    if is_bad:
        raise TransportError(f"its receiver says: {text}")


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes. Raises ConnectionError when the other side ends before."""
    data = bytearray(nbytes)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """As `receive`, straight into memory."""
    done, nbytes = 0, len(target)
    while done < nbytes:
        received = connection.recv_into(target[done:], nbytes - done, socket.MSG_WAITALL)
        if received == 0:
            raise ConnectionError("the other side ended the connection")
        done += received


def keep_alive(connection: socket.socket) -> None:
    """Block as long as it takes, but notice a host that is gone; send without delay."""
    connection.settimeout(None)
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS),
    ]
    for level, option, value in options:
        connection.setsockopt(level, option, value)


def set_buffers(connection: socket.socket, nbytes: int) -> None:
    """Before the connection is made, since the window is agreed on then."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def hang_up(connection: socket.socket) -> None:
    """Wake whoever reads or writes here, and drop what has not been sent."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def describe(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()
