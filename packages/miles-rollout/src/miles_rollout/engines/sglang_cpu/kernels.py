"""A stand-in for `sgl_kernel`, whose CPU build needs AMX and is not in the stock wheel.

Without AMX, SGLang takes the torch version of every fused operation, so only the names that it imports on any CPU have
to exist. One of them is really called. The others raise when called and say which one is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

NAME = "sgl_kernel"


def install() -> None:
    """Provide `sgl_kernel` unless it is installed. Idempotent."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    sys.modules[NAME] = KernelStand(NAME)


class KernelStand(ModuleType):
    """The module that `import sgl_kernel` gives."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0.0.0+cpu"
        self.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"sgl_kernel.{name} has no version for this CPU. The model or option in use needs a GPU, or a machine "
                "with AMX and the CPU build of sgl-kernel."
            )

        return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Note in the request table where the KV cache of newly written tokens lies.

    Args:
        req_pool_indices: [B] row of each request.
        req_to_token: [R, pool_len] the table, written in place.
        start_offset: [B] first new token of each request.
        end_offset: [B] one past the last.
        out_cache_loc: cache slots of all new tokens, request after request.
        pool_len: row length of the table; only the compiled kernel needs it.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
