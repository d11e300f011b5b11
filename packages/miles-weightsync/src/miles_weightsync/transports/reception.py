"""The receiving side of what comes over sockets: memory, a listener, and connections that each belong to a region."""

from __future__ import annotations

import secrets
import socket
import struct
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from ..errors import TransportError, TransportTimeout
from .base import Bytes, Region
from .incoming import InboxBase
from .links import Listener, receive, set_buffers
from .memory import Memory

FRAME = struct.Struct("!QQQ")
"""Epoch, offset, length."""


class SocketInbox(InboxBase[Memory]):
    """Memory that any host can reach. `fence` cuts the connections; `seal` and `release` wait for the last byte.

    Args:
        host: address of this host that senders can reach; the inbox listens there.
        port: 0 takes a free one.
        buffer_bytes: the kernel's buffer for each connection.
        allocate: makes the memory, for instance pinned; anything that returns [n] uint8.
    """

    why_not_ended = "a read into it goes on although its connection was cut."
    patience_s = 1.0
    """How long `release` waits for writes to end."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        buffer_bytes: int = 1 << 20,
        allocate: Callable[[int], Bytes] | None = None,
    ) -> None:
        super().__init__()
        self._allocate = allocate or _allocate
        self._ids: dict[int, tuple[Region, Memory]] = {}
        self._spare: Bytes | None = None
        self._buffer_bytes = buffer_bytes
        self._listener = Listener(host, port, name=f"weightsync-{self.transport}", serve=self._serve)

    def _make(self, nbytes: int, epoch: int) -> tuple[Region, Memory]:
        data, self._spare = self._spare, None
        if data is not None and data.nbytes < nbytes:
            self._let_go(data)
            data = None
        if data is None:
            try:
                data = self._allocate(nbytes)
            except MemoryError:
                raise TransportError(f"This process cannot allocate the {nbytes} bytes of a region.") from None
            self._take_on(data)
        id, listener = secrets.randbits(63), self._listener
        address: dict[str, str | int] = {
            "host": listener.host, "port": listener.port, "token": listener.token, "id": id,
        }  # fmt: skip
        region = Region(transport=self.transport, nbytes=nbytes, epoch=epoch, address=address)
        self._ids[id] = region, self._memory(data)
        return self._ids[id]

    def _show(self, memory: Memory, region: Region) -> Bytes:
        return memory.data[: region.nbytes]

    def _refuse(self, region: Region, memory: Memory) -> None:
        memory.refuse()

    def _shut_out(self, region: Region, memory: Memory, *, timeout_s: float) -> None:
        if not memory.shut_out(timeout_s):
            raise TransportTimeout(f"{region} may still change after {timeout_s:g} s: {self.why_not_ended}")

    def _free(self, region: Region, memory: Memory) -> None:
        self._ids.pop(region.number("id"), None)
        if not memory.shut_out(self.patience_s):
            self._keep_aside(memory)
        elif self._is_closed:
            self._let_go(memory.data)
        else:
            kept = sorted((data for data in (self._spare, memory.data) if data is not None), key=len)
            self._spare = kept.pop()
            for data in kept:
                self._let_go(data)

    def _shut(self) -> None:
        self._listener.close()
        if self._spare is not None:
            self._let_go(self._spare)
            self._spare = None

    def _memory(self, data: Bytes) -> Memory:
        return Memory(data)

    def _take_on(self, data: Bytes) -> None:
        """Memory is new."""

    def _let_go(self, data: Bytes) -> None:
        """Memory goes back to the process."""

    def _keep_aside(self, memory: Memory) -> None:
        """Memory that somebody may still write to must not."""

    def _serve(self, connection: socket.socket, id: int, epoch: int) -> None:
        with self._lock:
            found = self._ids.get(id)
        if found is None or found[0].epoch != epoch:
            raise TransportError(f"no region of this inbox, or no longer (epoch {epoch})")
        region, memory = found
        set_buffers(connection, self._buffer_bytes)
        with memory.connected(connection):
            self._fill(connection, region, memory)

    @abstractmethod
    def _fill(self, connection: socket.socket, region: Region, memory: Memory) -> None:
        """Reply, and bring what comes over a connection into the memory, inside `memory.filling()`, until it ends."""


def next_frame(connection: socket.socket, region: Region) -> tuple[int, int]:
    """Offset and length of what a sender brings next; the frame is checked.

    Raises:
        TransportError: it does not belong here.
        ConnectionError: there is none any more.
    """
    epoch, offset, nbytes = FRAME.unpack(receive(connection, FRAME.size))
    if epoch != region.epoch or offset + nbytes > region.nbytes:
        raise TransportError(f"a frame of epoch {epoch} for {nbytes} bytes at {offset} does not lie in {region}")
    return offset, nbytes


def _allocate(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)
