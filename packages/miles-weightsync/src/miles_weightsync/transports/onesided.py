"""Writes by a transfer engine (RDMA, UCX) straight into the receiver's memory, which nobody there can stop.

So every sender that may write keeps a connection to the receiver open, and says goodbye on it once its last write has
ended. A receiver that ends a region asks all to stop; memory is used again only when all have said goodbye. After one
that vanished, or does not answer, the memory is kept aside until the process ends, since bytes may still land there.

```
 sender                          receiver
 connect, token, region ───────▶ let it in
        ◀── engine, pointer ──
 ══ writes ══▶                   (takes no part)
        ◀── stop ── ┆            fence, seal, release
 goodbye ─────────▶              the memory is the receiver's alone
```
"""

from __future__ import annotations

import contextlib
import json
import mmap
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ..errors import TransportError
from .base import Bytes, Region
from .links import describe, dial, hang_up, receive, reply
from .memory import Memory
from .outgoing import LinkedOutbox, Piece, Write, split
from .reception import SocketInbox

_PIECE_BYTES = 8 << 20
"""The engine sends from buffers of this size, which are registered once: registering costs more than copying."""
_PIECES_UNDER_WAY = 2
_LEAVE_S = 2.0
"""A sender that is cancelled waits so long for its last writes; a receiver so long for goodbyes when it releases."""
_TURN_MS = 1
"""Between two steps of an engine that has guests."""
_LENGTH = struct.Struct("!I")
_STOP, _GOODBYE = b"s", b"g"

Description = Mapping[str, str | int]


_never_freed: list[Bytes] = []
"""What an engine may still read or write."""
_areas: dict[int, mmap.mmap] = {}
"""What `_fresh` has made, by address. Never unmapped, only emptied."""


class Engine(Protocol):
    """A transfer engine: one a process, and safe to use from several threads."""

    def describe(self, data: Bytes) -> Description:
        """What the engine of another process needs to reach registered memory; its `pointer` is where it begins."""
        ...

    def register(self, data: Bytes) -> None:
        """Make memory known; raises TransportError when the engine refuses."""
        ...

    def unregister(self, data: Bytes) -> None: ...

    def progress(self) -> None:
        """Take the steps that an engine without a thread must take where others write to. Called all the time while
        there are guests; the side that writes asks `is_done` instead. Raises TransportError."""
        ...

    def open(self, description: Description) -> object:
        """A target for `submit`."""
        ...

    def submit(self, target: object, pointer: int, data: Bytes) -> object:
        """Start to write registered `data` to `pointer` of the target's process; raises TransportError."""
        ...

    def is_done(self, handle: object) -> bool:
        """Whether it has arrived; raises TransportError when it never will. Not asked again after either."""
        ...


class _GuestMemory(Memory):
    """Memory that guests write to until they say goodbye."""

    def __init__(self, data: Bytes) -> None:
        super().__init__(data)
        self.is_doubtful = False
        """A guest left without goodbye."""

    def refuse(self) -> None:
        with self._changed:
            was_over, self._is_over = self._is_over, True
            if not was_over:
                for connection in self._connections:
                    with contextlib.suppress(OSError):
                        connection.send(_STOP, socket.MSG_DONTWAIT)

    def shut_out(self, timeout_s: float) -> bool:
        return super().shut_out(timeout_s) and not self.is_doubtful

    def evict(self) -> None:
        """Cut the connections of those who have not left."""
        super().refuse()


class OneSidedInbox(SocketInbox):
    """Memory registered with a transfer engine.

    Args:
        engine: of this process.
        host: address of this host that senders can reach.
        allocate: makes the memory, at addresses that it gave nobody before; anything that returns [n] uint8.
    """

    patience_s = _LEAVE_S
    why_not_ended = (
        "a sender died or stands still with writes under way, which nobody can take back. Release it (its memory is "
        "kept aside) and register another."
    )

    def __init__(self, engine: Engine, *, host: str, allocate: Callable[[int], Bytes] | None = None) -> None:
        super().__init__(host=host, allocate=allocate or _fresh)
        self._engine = engine
        self._lost_bytes = 0

    @property
    def lost_bytes(self) -> int:
        """Memory kept aside until the process ends, because a sender may still write to it. Unless `allocate` has made
        it, it is empty, and only its addresses are lost."""
        return self._lost_bytes

    def _memory(self, data: Bytes) -> Memory:
        return _GuestMemory(data)

    def _take_on(self, data: Bytes) -> None:
        if data.nbytes:
            self._engine.register(data)

    def _let_go(self, data: Bytes) -> None:
        if data.nbytes:
            self._engine.unregister(data)
            _empty(data)

    def _keep_aside(self, memory: Memory) -> None:
        assert isinstance(memory, _GuestMemory)
        memory.evict()
        self._let_go(memory.data)  # an RDMA device takes no write to it from now on; a socket might
        self._lost_bytes += memory.data.nbytes
        _never_freed.append(memory.data)

    def _fill(self, connection: socket.socket, region: Region, memory: Memory) -> None:
        assert isinstance(memory, _GuestMemory)
        with memory.filling():
            said = b""
            try:
                text = json.dumps(dict(self._engine.describe(memory.data))).encode()
                reply(connection)
                connection.sendall(_LENGTH.pack(len(text)) + text)
                said = self._attend(connection)
            finally:
                memory.is_doubtful |= said != _GOODBYE

    def _attend(self, connection: socket.socket) -> bytes:
        """Help a guest until it says something."""
        said = select.poll()
        said.register(connection, select.POLLIN)
        while not said.poll(_TURN_MS):
            self._engine.progress()
        return receive(connection, 1)


class _Visit:
    """The writes to one region, by one thread, and another that listens for `stop`."""

    def __init__(self, region: Region, *, outbox: OneSidedOutbox) -> None:
        self._region, self._outbox = region, outbox
        self._changed = threading.Condition()
        self._queue: deque[Piece] = deque()
        self._connection: socket.socket | None = None
        self._is_in = False
        self.problem: TransportError | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightsync-{outbox.transport}-out", daemon=True)
        self._thread.start()

    def add(self, write: Write) -> None:
        pieces = split(write, _PIECE_BYTES)
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._queue.extend(pieces)
            self._changed.notify_all()

    def end(self, problem: TransportError) -> None:
        """Start no more writes; returns when those under way have ended, or are not waited for any longer."""
        self._fail(problem)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            id = self._region.number("id")
            with dial(self._region, buffer_bytes=1 << 16, id=id, opened=self._opened) as connection:
                (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
                details: dict[str, str | int] = json.loads(receive(connection, length))
                with self._changed:
                    self._is_in = True
                listener = threading.Thread(target=self._listen, args=(connection,), daemon=True)
                listener.start()
                try:
                    if self._bring(self._outbox.engine.open(details), int(details["pointer"])):
                        connection.sendall(_GOODBYE)
                finally:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)  # wakes the listener; the goodbye goes out all the same
                    listener.join()
        except TransportError as error:
            self._fail(error)
        except OSError as error:
            self._fail(TransportError(f"the connection to its receiver broke ({describe(error)})"))

    def _opened(self, connection: socket.socket) -> None:
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._connection = connection

    def _listen(self, connection: socket.socket) -> None:
        told = "its receiver has ended the connection"
        with contextlib.suppress(OSError):
            if receive(connection, 1) == _STOP:
                told = "its receiver takes no writes any more: sealed, fenced off or released"
        self._fail(TransportError(told))

    def _bring(self, target: object, pointer: int) -> bool:
        """Write until there is a problem; whether all writes that were begun have ended."""
        under_way = deque[tuple[object, Bytes, Piece]]()
        buffers = [self._outbox.borrow() for _ in range(_PIECES_UNDER_WAY)]
        try:
            while (piece := self._take(wait=not under_way)) is not None or under_way:
                if piece is not None:
                    buffer = buffers.pop()
                    write, place = piece.write, pointer + piece.write.offset + piece.start
                    try:
                        handle = self._outbox.put(target, place, write, piece.start, piece.stop, buffer)
                    except TransportError as error:
                        buffers.append(buffer)
                        self._fail(error, [piece])
                        continue
                    under_way.append((handle, buffer, piece))
                if under_way and (piece is None or not buffers):
                    handle, buffer, piece = under_way[0]
                    if not self._finish_one(handle, piece):
                        return False
                    under_way.popleft()
                    buffers.append(buffer)
            return True
        finally:
            self._outbox.give_back(buffers)
            for _, buffer, piece in under_way:
                _never_freed.append(buffer)
                self._fail(TransportError("it was given up"), [piece])

    def _finish_one(self, handle: object, piece: Piece) -> bool:
        """Wait for a write under way; False when it is given up, having been told to stop."""
        pause, deadline = 20e-6, None
        while True:
            try:
                if self._outbox.engine.is_done(handle):
                    self._outbox.arrived(piece.write)
                    return True
            except TransportError as error:
                self._fail(error, [piece])
                return True
            if self.problem is not None:
                deadline = deadline or time.monotonic() + _LEAVE_S
                if time.monotonic() > deadline:
                    return False
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def _take(self, *, wait: bool) -> Piece | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self.problem is not None)
            return self._queue.popleft() if self._queue else None

    def _fail(self, problem: TransportError, pieces: Sequence[Piece] = ()) -> None:
        with self._changed:
            self.problem = self.problem or problem
            lost = [*pieces, *self._queue]
            self._queue.clear()
            if not self._is_in and self._connection is not None:
                hang_up(self._connection)
            self._changed.notify_all()
        for piece in lost:
            self._outbox.lost(piece.write, self.problem)


class OneSidedOutbox(LinkedOutbox):
    """Writes by a transfer engine. When `cancel` returns nothing more lands, unless the receiver stands still: then
    what is under way may land later, and the inbox keeps that memory aside."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._buffers: list[Bytes] = []

    def borrow(self) -> Bytes:
        """For the visits: a registered buffer."""
        with self._changed:
            if self._buffers:
                return self._buffers.pop()
        buffer = np.empty(_PIECE_BYTES, np.uint8)
        self.engine.register(buffer)
        return buffer

    def give_back(self, buffers: Sequence[Bytes]) -> None:
        """For the visits: buffers that the engine has done with."""
        with self._changed:
            self._buffers.extend(buffers)

    def put(self, target: object, pointer: int, write: Write, start: int, stop: int, buffer: Bytes) -> object:
        """For the visits: start to bring data[start:stop] of a write over, by way of a registered buffer."""
        np.copyto(buffer[: stop - start], write.data[start:stop])
        return self.engine.submit(target, pointer, buffer[: stop - start])

    def _open(self, region: Region) -> _Visit:
        return _Visit(region, outbox=self)

    def _shut(self) -> None:
        super()._shut()
        for buffer in self._buffers:
            self.engine.unregister(buffer)
        self._buffers.clear()


def _fresh(nbytes: int) -> Bytes:
    """[nbytes] where no memory of this process lay that an engine was told of.

    A sender's NIXL adds what it hears of a receiver to what it has heard before: memory that is gone would hide parts
    of what lies there now (`NIXL_ERR_NOT_FOUND`). Forgetting the receiver instead costs two file descriptors each time.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(area, np.uint8)
    _areas[data.ctypes.data] = area
    return data


def _empty(data: Bytes) -> None:
    """Give the pages back to the kernel and keep the addresses: what is written there later does no harm."""
    area = _areas.get(data.ctypes.data)
    if area is not None:
        area.madvise(mmap.MADV_DONTNEED)
