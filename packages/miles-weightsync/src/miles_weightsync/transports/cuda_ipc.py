"""Same GPU, or GPUs that reach one another: the sender copies into the receiver's device memory through CUDA IPC.

Memory is the receiver's device tensor; goodbyes as in `onesided.py`. Written against torch's API (the handles that its
own tensor sharing uses), and not run on a GPU yet.
"""

from __future__ import annotations

import threading
from typing import Any, cast

from ..errors import MissingDependency, RegionError, TransportError
from .base import Bytes, Region, Ticket
from .memory import Memory
from .onesided import Description, OneSidedInbox, OneSidedOutbox
from .outgoing import Write


class CudaIpcInbox(OneSidedInbox):
    """Device memory of the current CUDA device.

    `view` copies it to pinned host memory when called; `device_view` is the memory itself.

    Args:
        host: address for the connections on which senders come and go; both are on one host.
    """

    transport = "cuda_ipc"

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._cuda = _CudaIpc()
        super().__init__(self._cuda, host=host, allocate=_pinned)

    def device_view(self, region: Region) -> object:
        """The memory itself: a torch tensor, [nbytes] uint8."""
        return self._cuda.tensor_of(self._find(region).data)[: region.nbytes]

    def _show(self, memory: Memory, region: Region) -> Bytes:
        if region.nbytes:
            mirror = self._cuda.torch.from_numpy(memory.data)
            mirror[: region.nbytes].copy_(self._cuda.tensor_of(memory.data)[: region.nbytes])
        return memory.data[: region.nbytes]


class CudaIpcOutbox(OneSidedOutbox):
    """Copies from host memory (`write`) or from a tensor on a GPU (`write_tensor`)."""

    transport = "cuda_ipc"

    def __init__(self) -> None:
        self._cuda = _CudaIpc()
        super().__init__(self._cuda)

    def write_tensor(self, region: Region, offset: int, tensor: object) -> Ticket:
        """As `write`, from device to device. Waits for what is queued on the current stream; the tensor must stay as
        it is until the ticket is finished.

        Args:
            tensor: [n] contiguous uint8 on a CUDA device.
        """
        found: Any = tensor
        if found.dtype != self._cuda.torch.uint8 or found.ndim != 1 or not found.is_contiguous() or not found.is_cuda:
            raise RegionError(
                f"A tensor to write must be [n] contiguous uint8 on a CUDA device; got {found.dtype} of shape "
                f"{list(found.shape)} on {found.device}. Use `tensor.contiguous().reshape(-1).view(torch.uint8)`."
            )
        self._cuda.torch.cuda.current_stream(found.device).synchronize()
        return self._submit_write(region, offset, cast(Bytes, found))

    def put(self, target: object, pointer: int, write: Write, start: int, stop: int, buffer: Bytes) -> object:
        if not getattr(write.data, "is_cuda", False):
            return super().put(target, pointer, write, start, stop, buffer)
        return self._cuda.copy(target, pointer, write.data[start:stop])


class _CudaIpc:
    """torch.cuda as a transfer engine; pointers are offsets into the target."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        if not torch.cuda.is_available():
            raise MissingDependency(
                "The transport `cuda_ipc` needs torch for CUDA and a GPU; none is visible here. Use `shm`."
            )
        self._device: Any = torch.device("cuda", torch.cuda.current_device())
        self._stream: Any = self.torch.cuda.Stream(self._device)
        self._lock = threading.Lock()
        self._tensors: dict[int, Any] = {}

    def tensor_of(self, data: Bytes) -> Any:
        return self._tensors[data.ctypes.data]

    def register(self, data: Bytes) -> None:
        try:
            self._tensors[data.ctypes.data] = self.torch.empty(data.nbytes, dtype=self.torch.uint8, device=self._device)
        except self.torch.cuda.OutOfMemoryError:
            free, _ = self.torch.cuda.mem_get_info(self._device)
            raise TransportError(f"A region needs {data.nbytes} bytes of {self._device}; {free} are free.") from None

    def unregister(self, data: Bytes) -> None:
        del self._tensors[data.ctypes.data]

    def describe(self, data: Bytes) -> Description:
        # torch.multiprocessing.reductions.reduce_tensor takes the same eight values apart.
        device, handle, size, offset, counter, counter_offset, event, needs_sync = (
            self.tensor_of(data).untyped_storage()._share_cuda_()
        )
        return {
            "uuid": str(self.torch.cuda.get_device_properties(device).uuid), "handle": handle.hex(), "size": size,
            "offset": offset, "counter": counter.hex(), "counter_offset": counter_offset, "event": event.hex(),
            "needs_sync": int(needs_sync), "pointer": 0,
        }  # fmt: skip

    def progress(self) -> None:
        """Copies between devices need nothing of the receiver."""

    def open(self, description: Description) -> object:
        try:
            storage = self.torch.UntypedStorage._new_shared_cuda(
                self._index_of(str(description["uuid"])),
                bytes.fromhex(str(description["handle"])),
                int(description["size"]),
                int(description["offset"]),
                bytes.fromhex(str(description["counter"])),
                int(description["counter_offset"]),
                bytes.fromhex(str(description["event"])),
                bool(description["needs_sync"]),
            )
        except RuntimeError as error:
            raise TransportError(f"its device memory cannot be mapped ({str(error).splitlines()[0]})") from None
        whole = self.torch.empty(0, dtype=self.torch.uint8, device=storage.device)
        return whole.set_(storage)

    def submit(self, target: object, pointer: int, data: Bytes) -> object:
        return self.copy(target, pointer, self.torch.from_numpy(data))

    def copy(self, target: Any, offset: int, source: Any) -> object:
        """Start a copy; its event."""
        try:
            with self._lock, self.torch.cuda.stream(self._stream):
                target[offset : offset + source.numel()].copy_(source, non_blocking=True)
                event = self.torch.cuda.Event()
                event.record(self._stream)
                return event
        except RuntimeError as error:
            raise TransportError(f"the copy cannot be started ({str(error).splitlines()[0]})") from None

    def is_done(self, handle: Any) -> bool:
        try:
            return bool(handle.query())
        except RuntimeError as error:
            raise TransportError(f"the copy failed ({str(error).splitlines()[0]})") from None

    def _index_of(self, uuid: str) -> int:
        for index in range(self.torch.cuda.device_count()):
            if str(self.torch.cuda.get_device_properties(index).uuid) == uuid:
                return index
        raise TransportError(f"the receiver's GPU {uuid} is not visible to this process")


def _pinned(nbytes: int) -> Bytes:
    import torch

    pinned: Any = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return pinned.numpy()
