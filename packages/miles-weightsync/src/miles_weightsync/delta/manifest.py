"""What a stored version consists of: the record that its readers trust."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import xxhash

from .errors import StoreError

Kind = Literal["full", "delta"]
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a version."""

    name: str
    """What it holds, the same in every version of a chain: a tensor, or a bucket of a rank."""
    file: str
    """Where it lies, from the root of the store."""
    nbytes: int
    digest: str
    """xxh3-128 of the file, in hexadecimal."""
    dtype: str
    """Of the elements: `uint8`, `uint16` or `uint32`."""
    count: int
    """Elements of the array, of which a delta changes some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version in a `DeltaStore`."""

    version: int
    kind: Kind
    base: int | None
    """The version that a delta belongs on; None for full ones."""
    parts: tuple[Part, ...]
    """Sorted by name."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.version < 0:
            raise StoreError(f"Version {self.version} is negative; versions count up from 0.")
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise StoreError(f"Version {self.version} has {', '.join(twice[:3])} more than once: ranks overlap.")
        if (self.kind == "full") != (self.base is None):
            raise StoreError(f"Version {self.version} is {self.kind} and has base {self.base}; only deltas have one.")
        if self.base is not None and self.base >= self.version:
            raise StoreError(f"Version {self.version} has base {self.base}; a delta belongs on an earlier version.")

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, name: str) -> Part:
        at = bisect_left(self.parts, name, key=lambda part: part.name)  # `DeltaStore.publish` sorts them
        if at < len(self.parts) and self.parts[at].name == name:
            return self.parts[at]
        raise StoreError(f"Version {self.version} has no part {name!r}; it has {len(self.parts)} others.")


def to_json(manifest: Manifest) -> bytes:
    content = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"manifest": content, "digest": _digest(content)}, indent=1).encode()


def from_json(data: bytes, *, path: str) -> Manifest:
    """The manifest in `data`.

    Raises:
        StoreError: it is cut short, damaged, or of another format.
    """
    try:
        both = cast("dict[str, Any]", json.loads(data))
        content, digest = cast("dict[str, Any]", both["manifest"]), both["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} is no manifest: {error}. Publish a full version.") from error
    if _digest(content) != digest:
        raise StoreError(f"{path} was damaged: its digest differs. Publish a full version.")
    try:
        if (found := content.pop("format")) != _FORMAT:
            raise StoreError(_other_format(path, f"format {found!r}"))
        parts = cast("Sequence[dict[str, Any]]", content.pop("parts"))
        return Manifest(parts=tuple(Part(**part) for part in parts), **content)
    except (TypeError, KeyError, AttributeError) as error:
        raise StoreError(_other_format(path, f"other fields ({error})")) from error


def _other_format(path: str, what: str) -> str:
    return (
        f"{path} has {what}; this version of the package reads format {_FORMAT}. Let trainer and followers run the "
        "same version, and begin a store of its own with it."
    )


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
