"""The bytes that `/update_weights_from_tensor` unpickles, made without importing SGLang.

SGLang's `flattened_bucket` format is a pickled dict of one flat byte tensor and a list of descriptions that it reads by
attribute name only, so `types.SimpleNamespace` (on its allow-list of classes) stands in for its own class. One handle
a bucket, whatever the number of tensors. Read in SGLang 0.5.23: `weight_updater.py`, `SafeUnpickler`.
"""

from __future__ import annotations

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing.reductions

from .buckets import Bucket, torch_dtype

LOAD_FORMAT = "flattened_bucket"

reductions: Any = torch.multiprocessing.reductions
"""Untyped in PyTorch."""


class ShmHandle:
    """Stands for a flat byte tensor in a named shared-memory segment."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes


class CudaHandle:
    """Stands for a flat byte tensor on a GPU: the arguments of PyTorch's `rebuild_cuda_tensor`."""

    def __init__(self, rebuild_args: tuple[Any, ...]) -> None:
        self.rebuild_args = rebuild_args


Handle = ShmHandle | CudaHandle


def encode(bucket: Bucket, handle: Handle) -> str:
    """Describe a staged bucket to one engine rank, base64 as JSON needs it."""
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=torch_dtype(slot.dtype),
            start_idx=slot.start,
            end_idx=slot.stop,
            numel=slot.nbytes,
        )
        for slot in bucket.slots
    ]
    buffer = io.BytesIO()
    _HandlePickler(buffer, protocol=4).dump({"flattened_tensor": handle, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


class _Storage:
    def __init__(self, handle: ShmHandle) -> None:
        self.handle = handle


class _ByteStorage:
    def __init__(self, handle: ShmHandle) -> None:
        self.handle = handle


class _HandlePickler(pickle.Pickler):
    """Replaces handles by the calls that PyTorch's own pickling of a shared tensor would have written."""

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case ShmHandle():
                view = (0, (obj.nbytes,), (1,), False)  # offset, size, stride, requires_grad
                return reductions.rebuild_tensor, (torch.Tensor, _ByteStorage(obj), view)
            case _ByteStorage():
                return reductions.rebuild_typed_storage, (_Storage(obj.handle), torch.uint8)
            case _Storage():
                # No manager: the reader starts its own, and the owner of the segment needs none.
                name = ("/" + obj.handle.name).encode()
                return reductions.rebuild_storage_filename, (torch.UntypedStorage, b"", name, obj.handle.nbytes)
            case CudaHandle():
                return reductions.rebuild_cuda_tensor, obj.rebuild_args
            case _:
                return NotImplemented


def encode_command(command: str) -> str:
    """A list of one empty tensor whose name is the command: what a custom loader is handed; base64 as JSON needs it."""
    return base64.b64encode(bytes(ForkingPickler.dumps([(command, torch.empty(0, dtype=torch.uint8))]))).decode()
