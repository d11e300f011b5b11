"""Mooncake TransferEngine: RDMA between clusters' hosts, TCP where there is none."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from ..errors import MissingDependency, TransportError
from .base import Bytes
from .onesided import Description, OneSidedInbox, OneSidedOutbox

_engines: dict[tuple[str, str, str], _Mooncake] = {}
"""An engine keeps threads and ports until its process ends, so there is one for each way to make it."""
_engines_lock = threading.Lock()


class MooncakeInbox(OneSidedInbox):
    """Memory registered with Mooncake.

    Args:
        host: address of this host that senders can reach.
        protocol: `tcp` or `rdma`; the same on both sides.
        device: RDMA devices, comma-separated; empty takes all.
        allocate: makes the memory; see `OneSidedInbox`.
    """

    transport = "mooncake"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        allocate: Callable[[int], Bytes] | None = None,
    ) -> None:
        super().__init__(_engine(host, protocol, device), host=host, allocate=allocate)


class MooncakeOutbox(OneSidedOutbox):
    """Writes by Mooncake.

    Args:
        host: address of this host that receivers can reach.
        protocol: `tcp` or `rdma`; the same on both sides.
        device: RDMA devices, comma-separated; empty takes all.
    """

    transport = "mooncake"

    def __init__(self, *, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        super().__init__(_engine(host, protocol, device))


class _Mooncake:
    def __init__(self, host: str, protocol: str, device: str) -> None:
        try:
            module: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise MissingDependency(
                f"The transport `mooncake` cannot be loaded ({error}): pip install 'miles-weightsync[mooncake]'; on "
                "Debian also apt-get install libibverbs1."
            ) from None
        self._engine: Any = module.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise TransportError(f"Mooncake did not start on {host} with `{protocol}`; its log on stderr says why.")
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    def describe(self, data: Bytes) -> Description:
        return {"session": self._session, "pointer": data.ctypes.data}

    def register(self, data: Bytes) -> None:
        if self._engine.register_memory(data.ctypes.data, data.nbytes) != 0:
            raise TransportError(
                f"Mooncake did not register {data.nbytes} bytes: an RDMA device has a limit, `ulimit -l` another."
            )

    def unregister(self, data: Bytes) -> None:
        self._engine.unregister_memory(data.ctypes.data)

    def progress(self) -> None:
        """It has threads, which sleep while nothing happens."""

    def open(self, description: Description) -> object:
        return description["session"]

    def submit(self, target: object, pointer: int, data: Bytes) -> object:
        batch = self._engine.transfer_submit_write(target, data.ctypes.data, pointer, data.nbytes)
        if batch in (0, -1):
            raise TransportError(f"Mooncake cannot reach {target}")
        return batch

    def is_done(self, handle: object) -> bool:
        status = self._engine.transfer_check_status(handle)
        if status < 0:
            raise TransportError(f"Mooncake's write failed with status {status}; its log on stderr says why")
        return status == 1


def _engine(host: str, protocol: str, device: str) -> _Mooncake:
    with _engines_lock:
        key = (host, protocol, device)
        if key not in _engines:
            _engines[key] = _Mooncake(host, protocol, device)
        return _engines[key]
