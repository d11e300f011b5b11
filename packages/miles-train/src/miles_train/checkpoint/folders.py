"""Folders that are complete or absent, whatever dies while they are written."""

from __future__ import annotations

import shutil
from pathlib import Path

from miles_tito.shared.files import sync


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
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
