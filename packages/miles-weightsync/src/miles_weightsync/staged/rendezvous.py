"""Where receivers and trainer ranks call the leader: one listening socket, connections told apart by a secret."""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
from urllib.parse import urlsplit

from ..errors import SyncError
from ..wire import Channel, ConnectionLost, Message

_HELLO_S = 10.0


class Rendezvous:
    """Listens until closed. Whoever calls must know a token that `expect` gave out."""

    def __init__(self, *, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, 0), family=family, backlog=256)
        except OSError as error:
            raise SyncError(
                f"`listen_host = {host}` is not an address that this host can listen on: {error}.", phase="prepare"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()
        self._waiting: dict[str, queue.Queue[tuple[Channel, Message]]] = {}
        threading.Thread(target=self._accept, name="weightsync rendezvous", daemon=True).start()

    def expect(self) -> str:
        """A new token; connections that name it are kept for `collect`."""
        token = secrets.token_hex(16)
        with self._lock:
            self._waiting[token] = queue.Queue()
        return token

    def collect(self, token: str, count: int, *, timeout_s: float, what: str) -> dict[int, tuple[Channel, Message]]:
        """The first `count` hellos with different ranks, by rank; the token is of no more use then.

        Raises:
            SyncError: they did not come in time; names the ranks that did not.
        """
        with self._lock:
            waiting = self._waiting[token]
        found: dict[int, tuple[Channel, Message]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < count:
            try:
                channel, hello = waiting.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                break
            found[int(hello["rank"])] = (channel, hello)
            if hello.get("refused"):
                break
        self.forget(token)
        if len(found) < count and not any(hello.get("refused") for _, hello in found.values()):
            missing = sorted(set(range(count)) - set(found))
            for channel, _ in found.values():
                channel.close()
            raise SyncError(f"{what} {missing} did not call back within {timeout_s:.0f} s.", phase="attach")
        return found

    def forget(self, token: str) -> None:
        """Let nobody in with this token any more."""
        with self._lock:
            waiting = self._waiting.pop(token, None)
        while waiting is not None and not waiting.empty():
            waiting.get_nowait()[0].close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in `accept`
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(Channel(connection),), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        """One thread a caller: a silent one must not keep others out."""
        try:
            hello = channel.receive(_HELLO_S)
            token, rank = str(hello.get("token")), hello.get("rank")
        except (ConnectionLost, TimeoutError):
            channel.close()
            return
        with self._lock:
            known = next((each for each in self._waiting if hmac.compare_digest(each, token)), None)
            if known is not None and isinstance(rank, int):
                self._waiting[known].put((channel, hello))
                return
        channel.close()


def address_towards(url: str) -> str:
    """The address of this host that a server sees, or `127.0.0.1` where it runs here.

    Raises:
        OSError: there is no way to it.
    """
    host = urlsplit(url).hostname or "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, urlsplit(url).port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; only chooses the route
        return str(probe.getsockname()[0])
