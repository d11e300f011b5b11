"""What every transport does: a receiver registers memory, senders write into it, an epoch keeps late writes out.

```
 Inbox (engine rank)                                Outbox (trainer rank)
 register(nbytes, epoch) ─▶ Region ──── JSON ─────▶ write(region, offset, data) ─▶ Ticket
 view(region)  ◀────────────── bytes ────────────── wait([ticket, …], timeout_s)
 seal(region) / fence(epoch): nobody writes any more     cancel(region): this sender does not
 release(region): the memory may be used again      close()
 close()
```

A ticket is finished when its bytes lie in the memory that `view` shows. Writes are one-sided for the caller: the
receiver's own code takes no part in them. Memory that is registered holds anything until it is written to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import RegionError, TransportError

Bytes = NDArray[np.uint8]
"""[n] uint8, contiguous."""

_MODULES = {
    "shm": ("shm", "Shm"),
    "tcp": ("tcp", "Tcp"),
    "broadcast": ("broadcast", "Broadcast"),
    "nccl": ("broadcast", "Nccl"),
    "cupy_nccl": ("broadcast", "CupyNccl"),
    "mooncake": ("mooncake", "Mooncake"),
    "nixl": ("nixl", "Nixl"),
    "cuda_ipc": ("cuda_ipc", "CudaIpc"),
}
TRANSPORTS: tuple[str, ...] = tuple(_MODULES)
"""Names that `make_inbox` and `make_outbox` know. Some need an extra to be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Registered memory of one receiver, as a sender needs to know it."""

    transport: str
    nbytes: int
    epoch: int
    """The push that this memory was registered for. Grows with every push."""
    address: Mapping[str, str | int]
    """What the transport needs to reach it. May hold a secret: whoever has it can write."""

    def to_json(self) -> str:
        fields = {"transport": self.transport, "nbytes": self.nbytes, "epoch": self.epoch}
        return json.dumps({**fields, "address": dict(self.address)})

    @classmethod
    def from_json(cls, text: str) -> Region:
        """Read what `to_json` wrote.

        Raises:
            RegionError: it is no region; names the field.
        """
        try:
            found: object = json.loads(text)
        except ValueError as error:
            raise RegionError(
                f"A region must be JSON as `Region.to_json` writes it; {text[:80]!r} is not: {error}."
            ) from None
        if not isinstance(found, dict):
            raise RegionError(f"A region must be a JSON object; got {text[:80]!r}.")
        fields = cast("dict[str, object]", found)
        transport, address = fields.get("transport"), fields.get("address")
        if transport not in _MODULES:
            raise RegionError(f"A region's `transport` must be one of {', '.join(TRANSPORTS)}; got {transport!r}.")
        for name in ("nbytes", "epoch"):
            value = fields.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise RegionError(f"A region's `{name}` must be an integer of at least 0; got {value!r}.")
        if not isinstance(address, dict):
            raise RegionError(f"A region's `address` must be an object; got {address!r}.")
        for key, value in cast("dict[str, object]", address).items():
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise RegionError(f"`{key}` in a region's `address` must be a string or an integer; got {value!r}.")
        nbytes, epoch = cast(int, fields["nbytes"]), cast(int, fields["epoch"])
        return cls(transport=str(transport), nbytes=nbytes, epoch=epoch, address=cast("dict[str, str | int]", address))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal regions, and hashable."""
        return (self.transport, self.nbytes, self.epoch, *sorted(self.address.items()))

    def text(self, key: str) -> str:
        """A string of the address."""
        value = self.address.get(key)
        if not isinstance(value, str) or not value:
            raise RegionError(f"`{key}` is missing in the address of {self}, or is no text: {value!r}.")
        return value

    def number(self, key: str) -> int:
        """An integer of the address."""
        value = self.address.get(key)
        if not isinstance(value, int):
            raise RegionError(f"`{key}` is missing in the address of {self}, or is no integer: {value!r}.")
        return value

    def __str__(self) -> str:
        return f"the {self.transport} region of {self.nbytes} bytes, epoch {self.epoch}"


class Ticket(Protocol):
    """A write on its way."""

    @property
    def region(self) -> Region: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_finished(self) -> bool:
        """The bytes have arrived, or never will."""
        ...

    @property
    def error(self) -> TransportError | None:
        """Why they never will."""
        ...


class Inbox(Protocol):
    """The receiving side, one for each engine rank. Safe to use from several threads."""

    def register(self, nbytes: int, *, epoch: int) -> Region:
        """Make memory writable for senders.

        Raises:
            TransportError: there is not so much memory; says how much is needed and free.
            RegionError: the epoch has been fenced off.
        """
        ...

    def view(self, region: Region) -> Bytes:
        """The memory itself, [nbytes]. Valid until `release`."""
        ...

    def seal(self, region: Region, *, timeout_s: float) -> None:
        """End writing to a region: when this returns, none of its bytes changes any more.

        Raises:
            TransportTimeout: a sender that cannot be cut off is still writing.
        """
        ...

    def fence(self, epoch: int) -> None:
        """Refuse every write of an earlier epoch from now on. When this returns, no byte of one lands in memory that
        `view` hands out for this epoch or a later one, whatever its sender still believes. What was registered for an
        earlier epoch stays readable until released, but may change unless sealed."""
        ...

    def release(self, region: Region) -> None:
        """Give memory back. A region that was released already is no error."""
        ...

    def close(self) -> None:
        """Release everything. Closing twice is no error."""
        ...


class Outbox(Protocol):
    """The sending side, one for each trainer rank. Safe to use from several threads."""

    def write(self, region: Region, offset: int, data: Bytes) -> Ticket:
        """Start to bring `data` to `offset` of a region; returns at once.

        `data` must stay as it is until the ticket is finished. Writes are not ordered, so one that overlaps an
        unfinished one of this outbox is refused.

        Raises:
            RegionError: the range is not in the region, overlaps, or `data` is not [n] contiguous uint8.
        """
        ...

    def lease(self, region: Region, offset: int, nbytes: int) -> Bytes | None:
        """The receiver's memory itself, to write into directly; None where the transport cannot.

        `cancel` ends it; until then the receiver can neither seal the region nor use its memory again.
        """
        ...

    def wait(self, tickets: Iterable[Ticket], *, timeout_s: float) -> None:
        """Return when all have arrived.

        Raises:
            TransportTimeout: some have not, after `timeout_s`. They go on; `cancel` ends them.
            TransportError: one never will; raised as soon as it is known.
        """
        ...

    def cancel(self, region: Region) -> None:
        """Have no more to do with a region, finished or not: drop what is unfinished and end leases.

        Each transport says whether bytes already on the way may land after this returns; only `Inbox.seal` and
        `Inbox.fence` keep them out then.
        """
        ...

    def close(self) -> None:
        """Cancel everything and end all threads and connections. Closing twice is no error."""
        ...


def make_inbox(name: str, **options: object) -> Inbox:
    """The receiving side of a transport; `options` are the keyword arguments of its class.

    Raises:
        MissingDependency: the transport needs a package that is not installed.
    """
    return cast(Inbox, _class(name, "Inbox")(**options))


def make_outbox(name: str, **options: object) -> Outbox:
    """The sending side of a transport; as `make_inbox`."""
    return cast(Outbox, _class(name, "Outbox")(**options))


def _class(name: str, end: str) -> Any:
    if name not in _MODULES:
        raise RegionError(f"There is no transport `{name}`; choose from {', '.join(TRANSPORTS)}.")
    module, prefix = _MODULES[name]
    return getattr(import_module(f".{module}", __package__), prefix + end)
