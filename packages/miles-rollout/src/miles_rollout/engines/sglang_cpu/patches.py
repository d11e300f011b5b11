"""The places of SGLang 0.5.23 that assume a GPU, changed right after their module is imported.

A patch cannot wait until everything is imported: other modules copy the names (`from … import …`) on the way.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

WORD = 0xFFFFFFFF


def install() -> None:
    """Patch modules as they are imported, from now on in this process. Idempotent."""
    if not any(isinstance(finder, _PatchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchFinder(PATCHES))


def before_processes_start(engine: Any, choose: Callable[[int], str]) -> None:
    """Have `choose(dp_size)` set the start method right before the first process is started.

    SGLang sets `spawn` early in its launch; what the process is by the time it starts others is known only here.
    """
    launch = engine._launch_scheduler_processes.__func__

    def launch_scheduler_processes(cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        choose(server_args.dp_size)
        return launch(cls, server_args, *args, **kwargs)

    engine._launch_scheduler_processes = classmethod(launch_scheduler_processes)


def _plain_host_memory(module: Any) -> None:
    """Routed experts are captured into page-locked memory, which needs the CUDA driver; plain memory does here."""
    import torch

    def allocate(dims: Any, dtype: Any, device: Any, pin_memory: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _no_page_locked_memory(module: Any) -> None:
    """Batches with LoRA adapters go through such memory as well. Done where the backend for a CPU is imported, so that
    engines without adapters keep torch as it is."""
    import torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def without(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            del pin_memory
            return make(*args, **kwargs)

        return without

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, plain(getattr(torch, name)))

    def as_it_is(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        del device
        return self

    torch.Tensor.pin_memory = as_it_is


def _deterministic_attention(module: Any) -> None:
    """`--enable-deterministic-inference` (a seed for each request) refuses backends that depend on the batch.

    Torch-native attention runs one request at a time, so it does not.
    """
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _no_batch_invariant_kernels(module: Any) -> None:
    """The batch-invariant matmuls of the same option are Triton kernels; torch's on a CPU are used as they are."""

    def leave_as_is(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    module.enable_batch_invariant_mode = leave_as_is


def _torch_hash(module: Any) -> None:
    """The random numbers of a seeded request come from a hash that is a Triton kernel; this is the same in torch."""
    module.murmur_hash32 = murmur_hash32


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 (32 bit) of (seed low, seed high, position, column), as `sampling.murmur_hash` computes it.

    Args:
        seed: [B] 64-bit seeds.
        positions: [B] token positions.
        col_indices: [V] vocabulary columns.

    Returns:
        [B, V] uint32.
    """
    import torch

    def rotate(x: Any, bits: int) -> Any:
        return ((x << bits) | (x >> (32 - bits))) & WORD

    def mix(state: Any, block: Any) -> Any:
        block = (rotate((block * 0xCC9E2D51) & WORD, 15) * 0x1B873593) & WORD
        return (rotate(state ^ block, 13) * 5 + 0xE6546B64) & WORD

    seed = seed.view(torch.int64)
    state = mix(torch.zeros_like(seed), seed & WORD)
    state = mix(state, (seed >> 32) & WORD)
    state = mix(state, positions.to(torch.int64) & WORD)
    state = mix(state[:, None], col_indices.to(torch.int64)[None, :] & WORD)
    state = state ^ 16  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & WORD
    return (state ^ (state >> 16)).to(torch.uint32)


PATCHES: Mapping[str, Callable[[Any], None]] = {
    "sglang.kernels.ops.sampling.murmur_hash": _torch_hash,
    "sglang.srt.mem_cache.pool_host.common": _plain_host_memory,
    "sglang.srt.lora.backend.torch_backend": _no_page_locked_memory,
    "sglang.srt.arg_groups.choices": _deterministic_attention,
    "sglang.srt.batch_invariant_ops": _no_batch_invariant_kernels,
}


class _PatchFinder:
    """Finds the modules to patch as usual, and runs the patch after the module's own code."""

    def __init__(self, patches: Mapping[str, Callable[[Any], None]]) -> None:
        self.patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self.patches.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec
