"""Process groups of one broadcast's own, apart from whatever group the trainer or the engine has.

A group is made by rank 0 (the sender) and joined by all others at the same time, and lives as long as its set of
receivers. `gloo` runs on any machine. The two on NCCL are written against their APIs and have not run on a GPU yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from ..errors import MissingDependency, TransportError
from .base import Bytes

Join = Mapping[str, str | int]
"""What a receiver is told: how to find the group, its rank, and the number of ranks."""


class Collective(Protocol):
    """One rank's place in a group. Its calls raise RuntimeError when another rank is gone or late."""

    def broadcast(self, data: Bytes) -> None:
        """Rank 0 gives `data`; on all others it is overwritten."""
        ...


class Founder:
    """Makes groups with this process as rank 0.

    Args:
        kind: `gloo`, `nccl` or `cupy_nccl`.
        host: address of this host that receivers can reach.
        timeout_s: after which a rank that does not take part is given up.
    """

    def __init__(self, kind: str, *, host: str, timeout_s: float) -> None:
        self.kind, self._host, self._timeout_s = kind, host, timeout_s
        self._num_groups = 0
        self._store: Any = None
        if kind == "cupy_nccl":
            _cupy()
            return
        torch_dist = _torch_distributed()
        limit = timedelta(seconds=timeout_s)
        self._store = torch_dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)

    def invitations(self, size: int) -> list[dict[str, str | int]]:
        """What each rank needs to join a new group of `size`, rank 0 first."""
        self._num_groups += 1
        if self.kind == "cupy_nccl":
            nccl = _cupy().cuda.nccl
            # An NCCL id is a tuple of signed chars.
            where: dict[str, str | int] = {"id": ",".join(str(byte) for byte in nccl.get_unique_id())}
        else:
            where = {"host": self._host, "port": self._store.port, "name": f"broadcast-{self._num_groups}"}
        common: dict[str, str | int] = {
            **where,
            "kind": self.kind,
            "size": size,
            "timeout_ms": int(self._timeout_s * 1000),
        }
        return [{**common, "rank": rank} for rank in range(size)]

    def found(self, join: Join) -> Collective:
        """Rank 0's own place; returns when all others have joined."""
        return _enter(join, store=self._store, host=self._host)


def join_group(join: Join, *, kind: str, host: str) -> Collective:
    """A receiver's place.

    Args:
        kind: what this receiver is set up for.
        host: address of this host that the other ranks can reach.
    """
    if join.get("kind") != kind:
        raise TransportError(f"this receiver takes part in {kind} groups; the sender's is of {join.get('kind')}")
    store = None
    if kind != "cupy_nccl":
        limit = timedelta(milliseconds=int(join["timeout_ms"]))
        store = _torch_distributed().TCPStore(
            str(join["host"]), int(join["port"]), None, False, limit, wait_for_workers=False
        )
    return _enter(join, store=store, host=host)


def _enter(join: Join, *, store: Any, host: str) -> Collective:
    match join["kind"]:
        case "gloo":
            return _Gloo(join, store, host)
        case "nccl":
            return _Nccl(join, store)
        case "cupy_nccl":
            return _CupyNccl(join)
        case other:
            raise TransportError(f"there are no groups of {other}")


class _Gloo:
    """torch.distributed over TCP."""

    def __init__(self, join: Join, store: Any, host: str) -> None:
        dist = _torch_distributed()
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]  # else it asks the resolver for the host's own name
        options._timeout = timedelta(milliseconds=int(join["timeout_ms"]))
        options._threads = 1
        prefixed = dist.PrefixStore(str(join["name"]), store)
        self._group = gloo(prefixed, int(join["rank"]), int(join["size"]), options)
        self._root = dist.BroadcastOptions()
        self._root.rootRank = 0

    def broadcast(self, data: Bytes) -> None:
        torch = _torch()
        self._group.broadcast([torch.from_numpy(data)], self._root).wait()


class _Nccl:
    """torch.distributed between GPUs; bytes of the host go through a buffer on each GPU."""

    def __init__(self, join: Join, store: Any) -> None:
        torch, dist = _torch(), _torch_distributed()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(milliseconds=int(join["timeout_ms"]))
        prefixed = dist.PrefixStore(str(join["name"]), store)
        self._group = dist.ProcessGroupNCCL(prefixed, int(join["rank"]), int(join["size"]), options)
        self._is_root = join["rank"] == 0
        self._root = dist.BroadcastOptions()
        self._root.rootRank = 0
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def broadcast(self, data: Bytes) -> None:
        torch = _torch()
        if self._buffer.numel() < data.nbytes:
            self._buffer = torch.empty(data.nbytes, dtype=torch.uint8, device=self._device)
        host, device = torch.from_numpy(data), self._buffer[: data.nbytes]
        if self._is_root:
            device.copy_(host)
        self._group.broadcast([device], self._root).wait()
        if not self._is_root:
            host.copy_(device)
        torch.cuda.synchronize(self._device)


class _CupyNccl:
    """NCCL by itself, where neither side has torch's process groups."""

    def __init__(self, join: Join) -> None:
        self._cupy = _cupy()
        id = tuple(int(byte) for byte in str(join["id"]).split(","))
        self._group = self._cupy.cuda.nccl.NcclCommunicator(int(join["size"]), id, int(join["rank"]))
        self._is_root = join["rank"] == 0
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._buffer = self._cupy.empty(0, dtype=np.uint8)

    def broadcast(self, data: Bytes) -> None:
        nccl = self._cupy.cuda.nccl
        with self._stream:
            if self._buffer.size < data.nbytes:
                self._buffer = self._cupy.empty(data.nbytes, dtype=np.uint8)
            device = self._buffer[: data.nbytes]
            if self._is_root:
                device.set(data, stream=self._stream)
            self._group.broadcast(device.data.ptr, data.nbytes, nccl.NCCL_UINT8, 0, self._stream.ptr)
            if not self._is_root:
                device.get(stream=self._stream, out=data)
        self._stream.synchronize()


def check_installed(kind: str) -> None:
    """Raises MissingDependency or TransportError where a kind of group cannot run."""
    if kind == "cupy_nccl":
        _cupy()
        return
    dist = _torch_distributed()
    if kind == "nccl" and not dist.is_nccl_available():
        raise MissingDependency("This build of torch has no NCCL. Install torch for CUDA, or use `broadcast` (gloo).")


def _torch() -> Any:
    import torch

    return torch


def _torch_distributed() -> Any:
    import torch.distributed as dist

    if not dist.is_available():
        raise MissingDependency("This build of torch has no torch.distributed. Install another, or use `tcp`.")
    return dist


def _cupy() -> Any:
    try:
        cupy = importlib.import_module("cupy")
        importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise MissingDependency(
            f"The transport `cupy_nccl` needs CuPy and NCCL ({error}): pip install 'miles-weightsync[cupy]'"
        ) from None
    return cupy
