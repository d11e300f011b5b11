"""The receiver's bookkeeping that all transports share: registrations and the epoch below which nothing is taken."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from ..errors import RegionError, TransportError
from .base import Bytes, Region

M = TypeVar("M")
"""What a transport keeps for one registration."""


class InboxBase(ABC, Generic[M]):
    """An inbox less the memory and the way into it."""

    transport: str

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._registered: dict[tuple[object, ...], tuple[Region, M]] = {}
        self._epoch = 0
        self._is_closed = False

    def register(self, nbytes: int, *, epoch: int) -> Region:
        with self._lock:
            if self._is_closed:
                raise TransportError(f"This {self.transport} inbox is closed; make another.")
            if nbytes < 0:
                raise RegionError(f"A region cannot have {nbytes} bytes.")
            if epoch < self._epoch:
                raise RegionError(
                    f"Epoch {epoch} is over: this inbox takes {self._epoch} or later. A newer push has begun."
                )
            region, memory = self._make(nbytes, epoch)
            self._registered[region.key] = (region, memory)
            return region

    def view(self, region: Region) -> Bytes:
        return self._show(self._find(region), region)

    def seal(self, region: Region, *, timeout_s: float) -> None:
        self._shut_out(region, self._find(region), timeout_s=timeout_s)

    def fence(self, epoch: int) -> None:
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            over = [(region, memory) for region, memory in self._registered.values() if region.epoch < epoch]
            for region, memory in over:
                self._refuse(region, memory)

    def release(self, region: Region) -> None:
        with self._lock:
            found = self._registered.pop(region.key, None)
            if found is not None:
                self._free(*found)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for region, _ in list(self._registered.values()):
                self.release(region)
        self._shut()

    def _find(self, region: Region) -> M:
        with self._lock:
            found = self._registered.get(region.key)
        if found is None:
            raise RegionError(f"This {self.transport} inbox does not hold {region}: it was released, or is another's.")
        return found[1]

    @abstractmethod
    def _make(self, nbytes: int, epoch: int) -> tuple[Region, M]:
        """Memory that no earlier sender can reach."""

    @abstractmethod
    def _show(self, memory: M, region: Region) -> Bytes:
        """The memory, [region.nbytes]."""

    @abstractmethod
    def _refuse(self, region: Region, memory: M) -> None:
        """Let no write begin any more. Those that have begun may go on. Called again without harm."""

    @abstractmethod
    def _shut_out(self, region: Region, memory: M, *, timeout_s: float) -> None:
        """Refuse, and return when those that have begun have ended too."""

    @abstractmethod
    def _free(self, region: Region, memory: M) -> None:
        """Refuse, and give the memory back, or keep it for the next registration if nobody can write to it."""

    def _shut(self) -> None:
        """End threads and connections, give back what was kept. Everything has been released."""
