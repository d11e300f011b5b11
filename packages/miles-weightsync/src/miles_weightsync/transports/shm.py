"""Same host: the sender writes into the receiver's own memory in /dev/shm, one copy, or none with `lease`.

Writing cannot be taken away from a process that has mapped memory, so who writes says so by a record lock on the
segment, which the kernel drops when it dies, and asks *then* whether the region's name is still there. The receiver
removes the name first and looks for locks after: a writer that it does not see finds no name. Memory is used for
another region only when nobody writes; otherwise it is left to the writer, and the region gets memory of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..errors import StagingError, TransportError, TransportTimeout
from ..shm import HEADER_BYTES, Segment, clean_stale, is_linked
from .base import Bytes, Region
from .incoming import InboxBase
from .outgoing import OutboxBase, Write

_PIECE_BYTES = 16 << 20
"""Copied between two looks at whether the write was cancelled: about 2 ms."""


@dataclass(frozen=True, slots=True)
class _Memory:
    segment: Segment
    name: str
    """The name that this registration gave it. The segment's own name tells senders that it is still in use."""


class ShmInbox(InboxBase[_Memory]):
    """Memory in /dev/shm. One released piece is kept for the next push, since new memory costs as much as a copy.

    `fence` lets a write that has begun go on, into memory of its own epoch.
    """

    transport = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._spare: Segment | None = None
        clean_stale()

    def _make(self, nbytes: int, epoch: int) -> tuple[Region, _Memory]:
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes < nbytes:
            spare.close()
            spare = None
        try:
            segment = spare or Segment.create(nbytes)
        except StagingError as error:
            raise TransportError(str(error)) from None
        name = segment.link()
        address: dict[str, str | int] = {"segment": segment.name, "name": name, "bytes": segment.nbytes}
        return Region(transport="shm", nbytes=nbytes, epoch=epoch, address=address), _Memory(segment, name)

    def _show(self, memory: _Memory, region: Region) -> Bytes:
        return _array(memory.segment, 0, region.nbytes)

    def _refuse(self, region: Region, memory: _Memory) -> None:
        memory.segment.unlink()

    def _shut_out(self, region: Region, memory: _Memory, *, timeout_s: float) -> None:
        self._refuse(region, memory)
        deadline = time.monotonic() + timeout_s
        while memory.segment.has_writers:
            if time.monotonic() > deadline:
                raise TransportTimeout(
                    f"A sender on this host still writes to {region} after {timeout_s:g} s: it hangs or has "
                    "not cancelled a lease. Nothing else can tell when its bytes are complete; drop this region."
                )
            time.sleep(0.001)

    def _free(self, region: Region, memory: _Memory) -> None:
        self._refuse(region, memory)
        released = memory.segment
        if self._is_closed or released.has_writers:
            released.close()
            return
        if self._spare is not None:
            smaller, released = sorted((self._spare, released), key=lambda segment: segment.nbytes)
            smaller.close()
        self._spare = released

    def _shut(self) -> None:
        if self._spare is not None:
            self._spare.close()


class ShmOutbox(OutboxBase):
    """Copies with a few threads. When `cancel` returns, nothing more lands.

    Args:
        threads: copies that run at the same time.
    """

    transport = "shm"

    def __init__(self, *, threads: int = 2) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightsync-shm")
        self._segments: dict[str, Segment] = {}
        self._segments_lock = threading.Lock()
        self._leases: dict[tuple[object, ...], list[Segment]] = {}
        self._num_copying: dict[tuple[object, ...], int] = {}

    def lease(self, region: Region, offset: int, nbytes: int) -> Bytes | None:
        self._check(region, offset, nbytes)
        segment = self._enter(region)
        with self._changed:
            self._leases.setdefault(region.key, []).append(segment)
        return _array(segment, offset, nbytes)

    def _begin(self, write: Write) -> None:
        self._pool.submit(self._copy, write)

    def _copy(self, write: Write) -> None:
        with self._changed:
            if write.is_cancelled:
                return
            self._num_copying[write.region.key] = self._num_copying.get(write.region.key, 0) + 1
        error: TransportError | None = None
        try:
            with self._writing(write.region) as segment:
                target = _array(segment, write.offset, write.nbytes)
                for start in range(0, write.nbytes, _PIECE_BYTES):
                    if write.is_cancelled:
                        break
                    np.copyto(target[start : start + _PIECE_BYTES], write.data[start : start + _PIECE_BYTES])
                self._check_receiver(write.region, segment)
        except TransportError as problem:
            error = TransportError(f"The write of {write} failed: {problem}")
        with self._changed:
            self._num_copying[write.region.key] -= 1
            if not self._num_copying[write.region.key]:
                del self._num_copying[write.region.key]
            self._changed.notify_all()
            if not write.is_cancelled:
                self._finish(write, error)

    @contextlib.contextmanager
    def _writing(self, region: Region) -> Generator[Segment]:
        segment = self._enter(region)
        try:
            yield segment
        finally:
            segment.leave()

    def _enter(self, region: Region) -> Segment:
        """Map the memory, say that we write, and only then see whether we may."""
        with self._segments_lock:
            segment = self._map(region)
            segment.enter()
        try:
            self._check_receiver(region, segment)
        except TransportError:
            segment.leave()
            raise
        return segment

    def _check_receiver(self, region: Region, segment: Segment) -> None:
        if segment.owner_is_dead:
            raise TransportError(f"the receiver of {region} has died.")
        if not is_linked(region.text("name")):
            raise TransportError(f"the receiver no longer takes writes to {region}: sealed, fenced off or released.")

    def _map(self, region: Region) -> Segment:
        name = region.text("segment")
        if os.sep in name or os.sep in region.text("name"):
            raise TransportError(f"`{name}` in the address of {region} is no name of a segment.")
        for known, segment in list(self._segments.items()):
            if not segment.num_writers and not is_linked(known):  # its receiver has no more use for it
                self._segments.pop(known).close()
        if name not in self._segments:
            try:
                self._segments[name] = Segment.attach(name, region.number("bytes"))
            except (StagingError, ValueError) as error:
                raise TransportError(
                    f"the memory of {region} cannot be mapped ({error}). Has its receiver ended?"
                ) from None
        return self._segments[name]

    def _stop(self, region: Region) -> None:
        with self._changed:
            for segment in self._leases.pop(region.key, ()):
                segment.leave()
            while self._num_copying.get(region.key):
                self._changed.wait()

    def _shut(self) -> None:
        with self._changed:
            leased = [segment for segments in self._leases.values() for segment in segments]
            self._leases.clear()
        for segment in leased:
            segment.leave()
        self._pool.shutdown()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


def _array(segment: Segment, offset: int, nbytes: int) -> Bytes:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(segment.memory, np.uint8, nbytes, HEADER_BYTES + offset)
