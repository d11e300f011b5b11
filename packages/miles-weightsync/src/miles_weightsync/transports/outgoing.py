"""The sender's bookkeeping that all transports share: tickets, ranges, overlaps, deadlines."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import RegionError, TransportError, TransportTimeout
from .base import Bytes, Region, Ticket


class Write:
    """One write and how it stands. Changed only under the lock of its outbox."""

    __slots__ = ("data", "error", "is_cancelled", "is_finished", "nbytes", "offset", "pending", "region")

    def __init__(self, region: Region, offset: int, data: Bytes) -> None:
        self.region = region
        self.offset = offset
        self.data = data
        self.nbytes = data.nbytes
        self.is_cancelled = False
        self.is_finished = False
        self.error: TransportError | None = None
        self.pending = 1
        """Pieces that have not arrived, for transports that split a write."""

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at offset {self.offset} of {self.region}"


@dataclass(frozen=True, slots=True)
class Piece:
    """data[start:stop] of a write."""

    write: Write
    start: int
    stop: int


def split(write: Write, piece_bytes: int) -> list[Piece]:
    """A write in pieces, each of which has to arrive."""
    starts = range(0, write.nbytes, piece_bytes)
    write.pending = len(starts)
    return [Piece(write, start, min(start + piece_bytes, write.nbytes)) for start in starts]


class OutboxBase(ABC):
    """An outbox less the way in which bytes travel."""

    transport: str

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unfinished: dict[tuple[object, ...], list[Write]] = {}
        self._is_closed = False

    def write(self, region: Region, offset: int, data: Bytes) -> Ticket:
        check_data(data)
        return self._submit_write(region, offset, data)

    def lease(self, region: Region, offset: int, nbytes: int) -> Bytes | None:
        self._check(region, offset, nbytes)
        return None

    def wait(self, tickets: Iterable[Ticket], *, timeout_s: float) -> None:
        tickets, deadline = list(tickets), time.monotonic() + timeout_s
        with self._changed:
            while True:
                failed = next((ticket for ticket in tickets if ticket.error is not None), None)
                if failed is not None:
                    assert failed.error is not None
                    raise failed.error
                late = [ticket for ticket in tickets if not ticket.is_finished]
                if not late:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransportTimeout(
                        f"{len(late)} of {len(tickets)} writes are late after {timeout_s:g} s, first {late[0]}. "
                        "The receiver hangs or is slow: look at its log, or allow more time."
                    )
                self._changed.wait(left)

    def cancel(self, region: Region) -> None:
        with self._changed:
            cancelled = list(self._unfinished.get(region.key, ()))
            for write in cancelled:
                write.is_cancelled = True
        self._stop(region)
        for write in cancelled:
            self._finish(write, TransportError(f"The write of {write} was cancelled."))

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            regions = [writes[0].region for writes in self._unfinished.values() if writes]
        for region in regions:
            self.cancel(region)
        self._shut()

    @abstractmethod
    def _begin(self, write: Write) -> None:
        """Have other threads bring the bytes over, and call `_finish` then. A TransportError fails the write."""

    @abstractmethod
    def _stop(self, region: Region) -> None:
        """Drop what is cancelled, end the work on a region, and give back what is held for it."""

    @abstractmethod
    def _shut(self) -> None:
        """End threads and connections; everything has been cancelled."""

    def _submit_write(self, region: Region, offset: int, data: Bytes) -> Ticket:
        write = self._start(region, offset, data)
        if not write.is_finished:
            try:
                self._begin(write)
            except TransportError as error:
                self._finish(write, error)
        return write

    def _start(self, region: Region, offset: int, data: Bytes) -> Write:
        """A ticket for a write that may be done; finished already if there is nothing to do."""
        self._check(region, offset, data.nbytes)
        write = Write(region, offset, data)
        write.is_finished = write.nbytes == 0
        if write.is_finished:
            return write
        with self._changed:
            others = self._unfinished.setdefault(region.key, [])
            for other in others:
                if offset < other.offset + other.nbytes and other.offset < offset + write.nbytes:
                    raise RegionError(f"A write of {write} overlaps an unfinished one of {other}. Wait for it first.")
            others.append(write)
        return write

    def _finish(self, write: Write, error: TransportError | None = None) -> None:
        """All pieces of a write, or one of several, have arrived, or it failed. The first failure stands."""
        with self._changed:
            if write.is_finished:
                return
            write.pending -= 1
            if write.pending > 0 and error is None:
                return
            write.is_finished, write.error = True, error
            others = self._unfinished[write.region.key]
            others.remove(write)
            if not others:
                del self._unfinished[write.region.key]
            self._changed.notify_all()

    def _check(self, region: Region, offset: int, nbytes: int) -> None:
        if self._is_closed:
            raise TransportError(f"This {self.transport} outbox is closed; make another.")
        if region.transport != self.transport:
            raise RegionError(f"A {self.transport} outbox cannot write to {region}; make one for that transport.")
        if offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
            raise RegionError(f"{nbytes} bytes at offset {offset} do not lie within {region}.")


class Link(Protocol):
    """Brings the writes to one region over. The first problem ends it, and every write that it has."""

    problem: TransportError | None

    def add(self, write: Write) -> None: ...

    def end(self, problem: TransportError) -> None: ...


class LinkedOutbox(OutboxBase):
    """An outbox with a link to each region that it writes to; after a problem the next write opens another."""

    def __init__(self) -> None:
        super().__init__()
        self._links: dict[tuple[object, ...], Link] = {}

    def arrived(self, write: Write) -> None:
        """For the links: a piece is in place."""
        self._finish(write)

    def lost(self, write: Write, problem: TransportError) -> None:
        """For the links: a piece will never be in place."""
        if not write.is_cancelled:
            self._finish(write, TransportError(f"The write of {write} failed: {problem}"))

    @abstractmethod
    def _open(self, region: Region) -> Link:
        """A new link; it may not block."""

    def _begin(self, write: Write) -> None:
        with self._changed:
            link = self._links.get(write.region.key)
            if link is None or link.problem is not None:
                link = self._links[write.region.key] = self._open(write.region)
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


def check_data(data: Bytes) -> None:
    """Raise unless this is what a write takes."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise RegionError(
            f"Data must be [n] contiguous uint8; got {data.dtype} of shape {list(data.shape)} with strides "
            f"{list(data.strides)}. Use `np.ascontiguousarray(data).reshape(-1).view(np.uint8)`."
        )
