"""A stage on the leader's GPU, shared through CUDA IPC, for engines colocated with the trainer.

Thin on purpose, and not run where it was written (no GPU there): the leader's device must be visible to every other
local rank and to every engine process, since SGLang looks the device up by its UUID.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from .buckets import Bucket
from .errors import StagingError
from .payload import CudaHandle, Handle, reductions

_DEVICE = 6
"""Position of the device in the arguments of `rebuild_cuda_tensor`; SGLang reads a UUID there (`patch_torch.py`)."""


class CudaStage:
    """Bytes on one GPU that other processes map."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data: torch.Tensor | None = data

    @classmethod
    def create(cls, nbytes: int) -> CudaStage:
        if not torch.cuda.is_available():
            raise StagingError("`staging = cuda_ipc` needs a GPU in the trainer; none is visible. Use `staging = shm`.")
        return cls(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))

    @classmethod
    def attach(cls, rebuild_args: object) -> CudaStage:
        args = list(cast("tuple[Any, ...]", rebuild_args))
        args[_DEVICE] = _device_of(str(args[_DEVICE]))
        return cls(cast(torch.Tensor, reductions.rebuild_cuda_tensor(*args)))

    @property
    def data(self) -> torch.Tensor:
        assert self._data is not None, "the stage is closed"
        return self._data

    @property
    def rebuild_args(self) -> tuple[Any, ...]:
        return _shared(self.data)

    def handle(self, bucket: Bucket) -> Handle:
        return CudaHandle(_shared(self.data[: bucket.nbytes]))

    def retire_handles(self) -> None:
        """Nothing to withdraw: a handle has no name in a file system."""

    def close(self) -> None:
        self._data = None


def _shared(tensor: torch.Tensor) -> tuple[Any, ...]:
    args = list(cast("tuple[Any, ...]", reductions.reduce_tensor(tensor)[1]))
    args[_DEVICE] = _uuid_of(tensor.device)
    return tuple(args)


def _uuid_of(device: torch.device) -> str:
    properties: Any = cast(Any, torch.cuda).get_device_properties(device)
    return str(properties.uuid)


def _device_of(uuid: str) -> int:
    for device in range(torch.cuda.device_count()):
        if _uuid_of(torch.device("cuda", device)) == uuid:
            return device
    raise StagingError(
        f"The leader's GPU {uuid} is not visible to this rank; `staging = cuda_ipc` needs it. Use `shm`."
    )
