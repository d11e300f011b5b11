"""Files that appear whole or not at all: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

SUFFIX = ".partial"


def partial_of(path: Path) -> Path:
    """Where `path` is written until it is complete."""
    return path.with_name(path.name + SUFFIX)


def publish(file: IO[Any], path: Path) -> None:
    """Close the finished file at `partial_of(path)` and give it its name."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    partial_of(path).replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON document."""
    file = partial_of(path).open("w")
    with file:
        file.write(json.dumps(value, indent=2) + "\n")
        publish(file, path)
