"""Folders that are complete or absent, whatever dies while they are written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def fresh_partial(path: Path) -> Path:
    """An empty `<path>.partial` to fill; what a process that died left there is gone."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def replace_folder(new: Path, path: Path) -> None:
    """Put a finished folder in place of `path`; a crash in between leaves the old or the new one under a plain name."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a file, durable with its name when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
