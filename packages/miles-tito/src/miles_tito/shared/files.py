"""Files that are whole or absent, and on the device, not only in the operating system's memory."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Write a file that appears at `path` whole, in place of the one before.

    Args:
        durable: on the device when this returns; otherwise a crash of the machine may bring the old one back.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)
