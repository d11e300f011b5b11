"""One sender, many receivers: the same bytes to the same offset of every region, each link used once.

Every set of regions that is written to together has a group of its own (`collectives.py`). A connection to each
receiver says what comes and brings its answer back; only data go through the group. They land in a buffer first, so a
region can be ended although a collective cannot.

```
 sender ── JOIN group, rank ─▶ receivers            once for each set of regions
        ── epoch, offset, length ─▶
        ══ pieces, broadcast in the group ══▶ buffer ─▶ region
        ◀─ status, text ──
```
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from ..errors import TransportError
from .base import Bytes, Region, Ticket
from .collectives import Collective, Founder, Join, check_installed, join_group
from .links import describe, dial, hang_up, read_reply, receive, reply
from .memory import Memory
from .outgoing import OutboxBase, Write, check_data
from .reception import FRAME, SocketInbox, next_frame

_PIECE_BYTES = 16 << 20
_LENGTH = struct.Struct("!I")
_Key = tuple[object, ...]


class BroadcastInbox(SocketInbox):
    """Takes part in broadcasts of torch.distributed over gloo.

    Args:
        host: address of this host that the sender and the other receivers can reach.
        allocate: makes the memory; anything that returns [n] uint8.
    """

    transport = "broadcast"
    kind = "gloo"

    def __init__(self, *, host: str = "127.0.0.1", allocate: Callable[[int], Bytes] | None = None) -> None:
        check_installed(self.kind)
        super().__init__(host=host, allocate=allocate)
        self._host = host

    def _fill(self, connection: socket.socket, region: Region, memory: Memory) -> None:
        reply(connection)
        try:
            (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
            invitation: Join = json.loads(receive(connection, length))
            group = join_group(invitation, kind=self.kind, host=self._host)
            reply(connection)
            buffer = np.empty(min(_PIECE_BYTES, region.nbytes), np.uint8)
            while True:
                offset, nbytes = next_frame(connection, region)
                for start in range(offset, offset + nbytes, _PIECE_BYTES):
                    piece = buffer[: min(_PIECE_BYTES, offset + nbytes - start)]
                    group.broadcast(piece)
                    with memory.filling():
                        np.copyto(memory.data[start : start + piece.nbytes], piece)
                reply(connection)
        except (RuntimeError, ValueError, KeyError) as error:  # torch tells of ranks that are gone by RuntimeError
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"the broadcast broke here ({_first_line(error)})") from None


class _Circle:
    """A set of regions that get the same writes, by one thread. The first problem ends it for all of them."""

    def __init__(self, regions: Sequence[Region], *, outbox: BroadcastOutbox) -> None:
        self.regions = list(regions)
        self._outbox = outbox
        self._changed = threading.Condition()
        self._queue: deque[list[Write]] = deque()
        self._connections: list[socket.socket] = []
        self.problem: TransportError | None = None
        self._thread = threading.Thread(target=self._run, name="weightsync-broadcast-out", daemon=True)
        self._thread.start()

    def add(self, writes: list[Write]) -> None:
        with self._changed:
            if self.problem is not None:
                raise self.problem
            self._queue.append(writes)
            self._changed.notify_all()

    def end(self, problem: TransportError) -> None:
        """Cut the connections. A collective under way ends by itself, at the latest by its own timeout."""
        self._fail(problem)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        writes: list[Write] = []
        try:
            with ExitStack() as stack:
                for region in self.regions:
                    stack.enter_context(self._connect(region))
                group = self._gather()
                while (writes := self._take()) != []:
                    self._bring(group, writes)
                    writes = []
        except TransportError as error:
            self._fail(error, writes)
        except (OSError, RuntimeError) as error:
            self._fail(
                TransportError(f"the broadcast to {len(self.regions)} receivers broke ({_first_line(error)})"), writes
            )

    def _connect(self, region: Region) -> socket.socket:
        return dial(region, buffer_bytes=1 << 16, id=region.number("id"), opened=self._opened)

    def _opened(self, connection: socket.socket) -> None:
        with self._changed:
            if self.problem is not None:
                connection.close()
                raise self.problem
            self._connections.append(connection)

    def _gather(self) -> Collective:
        founder = self._outbox.founder()
        own, *others = founder.invitations(len(self.regions) + 1)
        for connection, invitation in zip(self._connections, others, strict=True):
            text = json.dumps(invitation).encode()
            connection.sendall(_LENGTH.pack(len(text)) + text)
        group = founder.found(own)
        self._read_replies()
        return group

    def _bring(self, group: Collective, writes: list[Write]) -> None:
        first = writes[0]
        for connection in self._connections:
            connection.sendall(FRAME.pack(first.region.epoch, first.offset, first.nbytes))
        data = first.data if first.data.flags.writeable else first.data.copy()  # torch takes no read-only memory
        for start in range(0, first.nbytes, _PIECE_BYTES):
            group.broadcast(data[start : start + _PIECE_BYTES])
        self._read_replies()
        for write in writes:
            self._outbox.arrived(write)

    def _read_replies(self) -> None:
        for region, connection in zip(self.regions, self._connections, strict=True):
            try:
                read_reply(connection)
            except (OSError, TransportError) as error:
                raise TransportError(f"{region} of {region.text('host')}: {describe(error)}") from None

    def _take(self) -> list[Write]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.problem is not None)
            return self._queue.popleft() if self._queue else []

    def _fail(self, problem: TransportError, writes: Sequence[Write] = ()) -> None:
        with self._changed:
            self.problem = self.problem or problem
            lost = [*writes, *(write for queued in self._queue for write in queued)]
            self._queue.clear()
            for connection in self._connections:
                hang_up(connection)
            self._changed.notify_all()
        for write in lost:
            self._outbox.lost(write, self.problem)


class BroadcastOutbox(OutboxBase):
    """Writes to any number of regions at once; `write` is the case of one.

    What is on the way when `cancel` is called may still land until the inbox seals, fences or releases the region. A
    receiver that fails ends the writes to all that were written to together with it.

    Args:
        host: address of this host that receivers can reach.
        timeout_s: after which a receiver that does not take part is given up.
    """

    transport = "broadcast"
    kind = "gloo"

    def __init__(self, *, host: str = "127.0.0.1", timeout_s: float = 30.0) -> None:
        check_installed(self.kind)
        super().__init__()
        self._host, self._timeout_s = host, timeout_s
        self._founder: Founder | None = None
        self._circles: dict[tuple[_Key, ...], _Circle] = {}

    def write_all(self, regions: Sequence[Region], offset: int, data: Bytes) -> list[Ticket]:
        """Start to bring `data` to the same offset of every region, all of one epoch; one ticket for each."""
        if len({region.epoch for region in regions}) > 1:
            raise TransportError(f"One broadcast goes to one epoch, not to {sorted({r.epoch for r in regions})}.")
        check_data(data)
        writes = [self._start(region, offset, data) for region in regions]
        waiting = [write for write in writes if not write.is_finished]
        if waiting:
            self._send(waiting)
        return list(writes)

    def founder(self) -> Founder:
        """For the circles: made when first needed, since it opens a port."""
        with self._changed:
            if self._founder is None:
                self._founder = Founder(self.kind, host=self._host, timeout_s=self._timeout_s)
            return self._founder

    def arrived(self, write: Write) -> None:
        """For the circles: the bytes are in place."""
        self._finish(write)

    def lost(self, write: Write, problem: TransportError) -> None:
        """For the circles: they will never be."""
        if not write.is_cancelled:
            self._finish(write, TransportError(f"The write of {write} failed: {problem}"))

    def _begin(self, write: Write) -> None:
        self._send([write])

    def _send(self, writes: list[Write]) -> None:
        key = tuple(write.region.key for write in writes)
        with self._changed:
            circle = self._circles.get(key)
            if circle is None or circle.problem is not None:
                circle = self._circles[key] = _Circle([write.region for write in writes], outbox=self)
        try:
            circle.add(writes)
        except TransportError as problem:
            for write in writes:
                self.lost(write, problem)

    def _stop(self, region: Region) -> None:
        with self._changed:
            keys = [key for key in self._circles if region.key in key]
            circles = [self._circles.pop(key) for key in keys]
        for circle in circles:
            circle.end(TransportError(f"it was cancelled for {region}"))

    def _shut(self) -> None:
        for circle in list(self._circles.values()):
            circle.end(TransportError("the outbox was closed"))
        self._circles.clear()
        self._founder = None


class NcclInbox(BroadcastInbox):
    """As BroadcastInbox, over NCCL on the current CUDA device. Not run on a GPU yet."""

    transport = kind = "nccl"


class NcclOutbox(BroadcastOutbox):
    """As BroadcastOutbox, over NCCL on the current CUDA device. Not run on a GPU yet."""

    transport = kind = "nccl"


class CupyNcclInbox(BroadcastInbox):
    """As NcclInbox, through CuPy instead of torch. Not run on a GPU yet."""

    transport = kind = "cupy_nccl"


class CupyNcclOutbox(BroadcastOutbox):
    """As NcclOutbox, through CuPy instead of torch. Not run on a GPU yet."""

    transport = kind = "cupy_nccl"


def _first_line(error: Exception) -> str:
    return (describe(error).strip().splitlines() or [type(error).__name__])[0]
