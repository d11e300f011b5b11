"""Whether this process may use a GPU, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from miles_rollout.engines.versions import Device

VISIBLE = "CUDA_VISIBLE_DEVICES"


def resolve_device(device: Literal["auto", "cpu", "cuda"], env: Mapping[str, str] | None = None) -> Device:
    """`auto` is cuda where a GPU is visible, cpu elsewhere."""
    if device == "auto":
        return "cuda" if has_gpu(env) else "cpu"
    return device


def has_gpu(env: Mapping[str, str] | None = None) -> bool:
    """Whether a GPU exists and is not hidden by CUDA_VISIBLE_DEVICES (of `env`, else of this process)."""
    visible = {**os.environ, **(env or {})}.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
