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

import socket
import threading
from collections import deque

from ..errors import TransportError
from .base import Region
from .links import describe, dial, hang_up, read_reply, receive_into, reply
from .memory import Memory
from .outgoing import LinkedOutbox, Piece, Write, split
from .reception import FRAME, SocketInbox, next_frame

_PIECE_BYTES = 4 << 20
"""A write is cut into frames of this size, which whichever stream is free takes."""
_FRAMES_UNDER_WAY = 2


class TcpInbox(SocketInbox):
    transport = "tcp"

    def _fill(self, connection: socket.socket, region: Region, memory: Memory) -> None:
        reply(connection)
        while True:
            offset, nbytes = next_frame(connection, region)
            with memory.filling():
                receive_into(connection, memory.data.data[offset : offset + nbytes])
            reply(connection)


class _Link:
    """The streams to one region. The first problem ends all of them, and every write that they have."""

    def __init__(self, region: Region, *, outbox: TcpOutbox) -> None:
        self._region = region
        self._outbox = outbox
        self._changed = threading.Condition()
        self._queue: deque[Piece] = deque()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.problem: TransportError | None = None

    def add(self, write: Write) -> None:
        pieces = split(write, _PIECE_BYTES)
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._queue.extend(pieces)
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
        under_way: deque[Piece] = deque()
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

    def _take(self, *, wait: bool) -> Piece | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self.problem is not None)
            return self._queue.popleft() if self._queue else None

    def _send(self, connection: socket.socket, piece: Piece) -> None:
        write = piece.write
        frame = FRAME.pack(write.region.epoch, write.offset + piece.start, piece.stop - piece.start)
        connection.sendall(frame, socket.MSG_MORE)
        connection.sendall(write.data.data[piece.start : piece.stop])

    def _fail(self, problem: TransportError, under_way: tuple[Piece, ...] | deque[Piece]) -> None:
        with self._changed:
            self.problem = self.problem or problem
            lost = [*under_way, *self._queue]
            self._queue.clear()
            for connection in self._connections:
                hang_up(connection)
            self._changed.notify_all()
        for piece in lost:
            self._outbox.lost(piece.write, self.problem)


class TcpOutbox(LinkedOutbox):
    """Writes over `streams` connections to each region.

    What the kernel has taken when `cancel` is called, up to `buffer_bytes` on each side of each stream, may still land
    until the inbox seals, fences or releases the region.
    """

    transport = "tcp"

    def __init__(self, *, streams: int = 4, buffer_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.streams = streams
        self.buffer_bytes = buffer_bytes

    def _open(self, region: Region) -> _Link:
        return _Link(region, outbox=self)
