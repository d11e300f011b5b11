"""Plain sockets: several streams for each region, straight out of the sender's memory into the receiver's.

A connection belongs to one region, so that ending the region ends the connection, and with it a read that waits for a
sender. Each frame is acknowledged once its bytes lie in place; two are on the way at a time.

```
 frame   epoch, offset, length, bytes ─▶
                                      ◀─ status, text
```

There is no copy in user space on either side. MSG_ZEROCOPY, splice and sendfile were measured on loopback against this:
none was faster with two streams.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from ..errors import TransportError, TransportTimeout
from .base import Bytes, Region
from .incoming import InboxBase
from .links import Listener, describe, dial, hang_up, read_reply, receive, receive_into, reply, set_buffers
from .outgoing import OutboxBase, Write

_FRAME = struct.Struct("!QQQ")
"""Epoch, offset, length."""
_PIECE_BYTES = 4 << 20
"""A write is cut into frames of this size, which whichever stream is free takes."""
_FRAMES_UNDER_WAY = 2


class _Memory:
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


class TcpInbox(InboxBase[_Memory]):
    """Memory that any host can reach. `fence` and `release` wait until the last byte has landed.

    Args:
        host: address of this host that senders can reach; the inbox listens there.
        port: 0 takes a free one.
        buffer_bytes: the kernel's buffer for each connection.
        allocate: makes the memory, for instance pinned; anything that returns [n] uint8.
    """

    transport = "tcp"

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
        self._ids: dict[int, tuple[Region, _Memory]] = {}
        self._spare: Bytes | None = None
        self._buffer_bytes = buffer_bytes
        self._listener = Listener(host, port, name="weightsync-tcp", serve=self._serve)

    def _make(self, nbytes: int, epoch: int) -> tuple[Region, _Memory]:
        data, self._spare = self._spare, None
        if data is None or data.nbytes < nbytes:
            try:
                data = self._allocate(nbytes)
            except MemoryError:
                raise TransportError(f"This process cannot allocate the {nbytes} bytes of a region.") from None
        id, listener = secrets.randbits(63), self._listener
        address: dict[str, str | int] = {
            "host": listener.host, "port": listener.port, "token": listener.token, "id": id,
        }  # fmt: skip
        region = Region(transport="tcp", nbytes=nbytes, epoch=epoch, address=address)
        self._ids[id] = region, _Memory(data)
        return self._ids[id]

    def _show(self, memory: _Memory, region: Region) -> Bytes:
        return memory.data[: region.nbytes]

    def _refuse(self, region: Region, memory: _Memory) -> None:
        memory.refuse()

    def _shut_out(self, region: Region, memory: _Memory, *, timeout_s: float) -> None:
        if not memory.shut_out(timeout_s):
            raise TransportTimeout(f"A read into {region} has not ended {timeout_s:g} s after its connection did.")

    def _free(self, region: Region, memory: _Memory) -> None:
        self._ids.pop(region.number("id"), None)
        is_ours = memory.shut_out(1.0)
        if is_ours and not self._is_closed and (self._spare is None or self._spare.nbytes < memory.data.nbytes):
            self._spare = memory.data

    def _shut(self) -> None:
        self._listener.close()
        self._spare = None

    def _serve(self, connection: socket.socket, id: int, epoch: int) -> None:
        with self._lock:
            found = self._ids.get(id)
        if found is None or found[0].epoch != epoch:
            raise TransportError(f"no region of this inbox, or no longer (epoch {epoch})")
        region, memory = found
        set_buffers(connection, self._buffer_bytes)
        with memory.connected(connection):
            reply(connection)
            while True:
                frame_epoch, offset, nbytes = _FRAME.unpack(receive(connection, _FRAME.size))
                if frame_epoch != epoch or offset + nbytes > region.nbytes:
                    raise TransportError(
                        f"a frame of epoch {frame_epoch} for {nbytes} bytes at {offset} does not lie in {region}"
                    )
                with memory.filling():
                    receive_into(connection, memory.data.data[offset : offset + nbytes])
                reply(connection)


@dataclass(frozen=True, slots=True)
class _Piece:
    write: Write
    start: int
    stop: int


class _Link:
    """The streams to one region. The first problem ends all of them, and every write that they have."""

    def __init__(self, region: Region, *, outbox: TcpOutbox) -> None:
        self._region = region
        self._outbox = outbox
        self._changed = threading.Condition()
        self._queue: deque[_Piece] = deque()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.problem: TransportError | None = None

    def add(self, write: Write) -> None:
        starts = range(0, write.nbytes, _PIECE_BYTES)
        write.pending = len(starts)
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._queue.extend(_Piece(write, start, min(start + _PIECE_BYTES, write.nbytes)) for start in starts)
            while len(self._threads) < min(self._outbox.streams, len(self._queue)):
                thread = threading.Thread(target=self._run, name="weightsync-tcp-out", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def end(self, problem: TransportError) -> None:
        """Cut the streams; returns when none of them reads the sender's memory any more."""
        self._fail(problem, ())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        under_way: deque[_Piece] = deque()
        try:
            connection = dial(
                self._region,
                buffer_bytes=self._outbox.buffer_bytes,
                id=self._region.number("id"),
                opened=self._opened,
            )
            with connection:
                while (piece := self._take(wait=not under_way)) is not None or under_way:
                    if piece is not None:
                        under_way.append(piece)
                        self._send(connection, piece)
                    if piece is None or len(under_way) == _FRAMES_UNDER_WAY:
                        read_reply(connection)
                        self._outbox.arrived(under_way.popleft().write)
        except TransportError as error:
            self._fail(error, under_way)
        except OSError as error:
            self._fail(TransportError(f"the connection to its receiver broke ({describe(error)})"), under_way)

    def _opened(self, connection: socket.socket) -> None:
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._connections.add(connection)

    def _take(self, *, wait: bool) -> _Piece | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self.problem is not None)
            return self._queue.popleft() if self._queue else None

    def _send(self, connection: socket.socket, piece: _Piece) -> None:
        write = piece.write
        frame = _FRAME.pack(write.region.epoch, write.offset + piece.start, piece.stop - piece.start)
        connection.sendall(frame, socket.MSG_MORE)
        connection.sendall(write.data.data[piece.start : piece.stop])

    def _fail(self, problem: TransportError, under_way: tuple[_Piece, ...] | deque[_Piece]) -> None:
        with self._changed:
            self.problem = self.problem or problem
            lost = [*under_way, *self._queue]
            self._queue.clear()
            for connection in self._connections:
                hang_up(connection)
            self._changed.notify_all()
        for piece in lost:
            self._outbox.lost(piece.write, self.problem)


class TcpOutbox(OutboxBase):
    """Writes over `streams` connections to each region.

    What the kernel has taken when `cancel` is called, up to `buffer_bytes` on each side of each stream, may still land
    until the inbox seals, fences or releases the region.
    """

    transport = "tcp"

    def __init__(self, *, streams: int = 2, buffer_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.streams = streams
        self.buffer_bytes = buffer_bytes
        self._links: dict[tuple[object, ...], _Link] = {}

    def arrived(self, write: Write) -> None:
        """For the streams: a piece is in place."""
        self._finish(write)

    def lost(self, write: Write, problem: TransportError) -> None:
        """For the streams: a piece will never be in place."""
        if not write.is_cancelled:
            self._finish(write, TransportError(f"The write of {write} failed: {problem}"))

    def _begin(self, write: Write) -> None:
        with self._changed:
            link = self._links.get(write.region.key)
            if link is None or link.problem is not None:
                link = self._links[write.region.key] = _Link(write.region, outbox=self)
        try:
            link.add(write)
        except TransportError as problem:
            raise TransportError(f"The write of {write} failed: {problem}") from None

    def _stop(self, region: Region) -> None:
        with self._changed:
            link = self._links.pop(region.key, None)
        if link is not None:
            link.end(TransportError("it was cancelled"))

    def _shut(self) -> None:
        for link in list(self._links.values()):
            link.end(TransportError("the outbox was closed"))
        self._links.clear()


def _allocate(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


INBOX, OUTBOX = TcpInbox, TcpOutbox
