"""A copy of the newest stored version in host memory: whole, or not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from ..buckets import torch_dtype
from ..delta import Chain, DeltaError, DeltaStore, StoreError
from ..delta.manifest import Manifest
from ..layout import ShardSpec
from ..shard import Shard
from .parallel import each
from .parts import Bits, read_layout


class Stopped(Exception):
    """Reading was broken off by `stop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What it took to come to a version."""

    version: int
    kind: Literal["full", "delta"]
    """`delta`: from the version that was held, by one or more deltas."""
    bytes: int
    """Read from the store, manifests aside."""
    seconds: float


class HostCopy:
    """Takes as much host memory as the weights, and twice as much while a version is fetched.

    Args:
        read_bytes: of parts that are being read at a time.
        stop: when set, a fetch breaks off.
    """

    def __init__(self, store: DeltaStore, *, read_bytes: int, stop: threading.Event) -> None:
        self._store, self._read_bytes, self._stop = store, read_bytes, stop
        self._arrays: dict[str, Bits] = {}
        self._layout: dict[str, ShardSpec] = {}
        self.version: int | None = None
        self.identity = ""
        """Of the version: tells it from another one of the same number."""

    def fetch(self) -> Fetched | None:
        """Come to the newest version. None where that is held, or the store is empty.

        Raises:
            StoreError: the store cannot be read, or a part is missing or damaged; the copy is as before.
            DeltaError: the copy is not what a delta was made against; it is dropped, so that the next fetch is whole.
            Stopped: `stop` was set; the copy is as before.
        """
        latest = self._store.latest()
        if latest is None or (latest == self.version and self._store.identity(latest) == self.identity):
            return None
        start = time.monotonic()
        chain = self._chain(latest)
        try:
            return self._take(*chain, start)
        except StoreError:
            newest = self._store.latest()
            again = None if newest is None else self._chain(newest)
            if again is None or again[1] == chain[1]:
                raise
            return self._take(*again, start)  # what was on the way was pruned meanwhile
        except DeltaError:
            self.drop()
            raise

    def shards(self) -> Iterator[Shard]:
        """The whole model, as the blocks that were put."""
        for part, spec in self._layout.items():
            extent = [stop - start for start, stop in spec.box]
            flat = torch.from_numpy(self._arrays[part].view("u1"))  # pyright: ignore[reportUnknownMemberType]
            yield Shard(spec.name, spec.shape, spec.dtype, spec.box, flat.view(torch_dtype(spec.dtype)).view(extent))

    def drop(self) -> None:
        """Forget everything."""
        self._arrays, self._layout, self.version, self.identity = {}, {}, None, ""

    def _chain(self, latest: int) -> tuple[str, Chain]:
        identity = self._store.identity(latest)  # before the chain: what is replaced in between is fetched again
        return identity, self._store.chain(self._base(latest), latest)

    def _base(self, latest: int) -> int | None:
        """The held version, where the store's deltas can be put on it."""
        if self.version is None or self.version >= latest:
            return None
        try:
            return self.version if self._store.identity(self.version) == self.identity else None
        except StoreError:  # pruned
            return None

    def _take(self, identity: str, chain: Chain, start: float) -> Fetched:
        last: Manifest | None = chain.deltas[-1] if chain.deltas else chain.full
        assert last is not None, "a chain to another version has something in it"
        layout = read_layout(last)
        sizes = dict.fromkeys(layout, 0)
        for manifest in (*([chain.full] if chain.full else []), *chain.deltas):
            for part in manifest.parts:
                sizes[part.name] = sizes.get(part.name, 0) + part.nbytes

        def make(part: str) -> Bits:
            if self._stop.is_set():
                raise Stopped
            if chain.full is not None:
                return self._store.restore(chain, part)
            assert self.version is not None, "a chain without a full version begins at the held one"
            array = self._arrays[part].copy()
            self._store.update(array, chain, part, holds=self.version)
            return array

        arrays = each(make, layout, nbytes=lambda part: sizes[part], limit=self._read_bytes)
        self._arrays = dict(zip(layout, arrays, strict=True))
        self._layout, self.version, self.identity = layout, last.version, identity
        kind = "delta" if chain.full is None else "full"
        return Fetched(version=last.version, kind=kind, bytes=chain.nbytes, seconds=time.monotonic() - start)
