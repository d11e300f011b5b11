"""NIXL over UCX: RDMA between hosts, shared memory and TCP where there is none."""

from __future__ import annotations

import base64
import importlib
import secrets
import threading
from collections.abc import Callable
from typing import Any

from ..errors import MissingDependency, TransportError
from .base import Bytes
from .onesided import Description, OneSidedInbox, OneSidedOutbox

_MODULES = ("nixl_cu12", "nixl_cu13")
_agents: dict[tuple[str, str], _Nixl] = {}
"""An agent keeps threads and ports until its process ends, so there is one for each backend and side; it cannot write
to itself."""
_agents_lock = threading.Lock()


class NixlInbox(OneSidedInbox):
    """Memory registered with NIXL.

    Args:
        host: address of this host that senders can reach. UCX chooses its own (UCX_NET_DEVICES).
        backend: of NIXL; the same on both sides.
        allocate: makes the memory; see `OneSidedInbox`.
    """

    transport = "nixl"

    def __init__(
        self, *, host: str = "127.0.0.1", backend: str = "UCX", allocate: Callable[[int], Bytes] | None = None
    ) -> None:
        super().__init__(_agent(backend, "inbox"), host=host, allocate=allocate)


class NixlOutbox(OneSidedOutbox):
    """Writes by NIXL.

    Args:
        backend: of NIXL; the same on both sides.
    """

    transport = "nixl"

    def __init__(self, *, backend: str = "UCX") -> None:
        super().__init__(_agent(backend, "outbox"))


class _Nixl:
    def __init__(self, backend: str) -> None:
        module = _import()
        self._lock = threading.Lock()  # an agent serves one call at a time unless made otherwise
        self._agent: Any = module.nixl_agent(
            f"miles-weightsync-{secrets.token_hex(8)}",
            # Its thread would spin on a core of every engine and trainer rank for as long as they live.
            module.nixl_agent_config(backends=[backend], enable_prog_thread=False),
        )
        self._registered: dict[int, object] = {}

    def describe(self, data: Bytes) -> Description:
        with self._lock:
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": agent, "pointer": data.ctypes.data}

    def register(self, data: Bytes) -> None:
        try:
            with self._lock:
                pointer = data.ctypes.data
                self._registered[pointer] = self._agent.register_memory([(pointer, data.nbytes, 0, "")], "DRAM")
        except Exception as error:  # its bindings have an exception for each status, with no other common base
            raise TransportError(f"NIXL did not register {data.nbytes} bytes ({error}); see `ulimit -l`.") from None

    def unregister(self, data: Bytes) -> None:
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(data.ctypes.data))

    def progress(self) -> None:
        try:
            with self._lock:
                self._agent.get_new_notifs()  # there are none: this takes the backend's steps
        except Exception as error:
            raise TransportError(f"NIXL stands still in the receiver ({error})") from None

    def open(self, description: Description) -> object:
        try:
            with self._lock:
                return self._agent.add_remote_agent(base64.b64decode(str(description["agent"]))).decode()
        except Exception as error:
            raise TransportError(f"NIXL cannot reach the receiver ({error})") from None

    def submit(self, target: object, pointer: int, data: Bytes) -> object:
        try:
            with self._lock:
                agent = self._agent
                local = agent.get_xfer_descs([(data.ctypes.data, data.nbytes, 0)], "DRAM")
                remote = agent.get_xfer_descs([(pointer, data.nbytes, 0)], "DRAM")
                transfer = agent.initialize_xfer("WRITE", local, remote, target, b"")
                if agent.transfer(transfer) == "ERR":
                    raise TransportError("NIXL refused the write")
                return transfer
        except Exception as error:
            raise TransportError(f"NIXL cannot write to the receiver ({error})") from None

    def is_done(self, handle: object) -> bool:
        try:
            with self._lock:
                state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    return False
                self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransportError(f"NIXL's write failed ({error})") from None
        if state != "DONE":
            raise TransportError(f"NIXL's write ended as {state}")
        return True


def _agent(backend: str, side: str) -> _Nixl:
    with _agents_lock:
        key = (backend, side)
        if key not in _agents:
            _agents[key] = _Nixl(backend)
        return _agents[key]


def _import() -> Any:
    problems: list[str] = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(str(error))
    raise MissingDependency(
        f"The transport `nixl` cannot be loaded ({'; '.join(problems)}): pip install 'miles-weightsync[nixl]'"
    )
