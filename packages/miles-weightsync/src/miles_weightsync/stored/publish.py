"""The trainer's end: every rank puts its own shards into a `DeltaStore`, the leader makes the version visible.

```
 every rank   shards ─▶ parts ─▶ delta against the version before ─▶ put ─┐                        ┌▶ keep as next base
 leader         kind_for          (sum of bytes: does it pay?)            └▶ publish ─▶ prune ─────┴▶ wait for engines
```
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from ..collective import Ranks
from ..delta import DeltaStore, Part, StoreError, choose, encode
from ..errors import SyncError
from ..layout import ShardSpec
from ..report import EngineOutcome
from ..shard import ShardLike, collect
from .arrivals import wait_for_engines
from .parallel import each
from .parts import METADATA, Bits, Stored, bits, describe, plan_parts

if TYPE_CHECKING:
    from ..config import PushConfig

_PAYS_BELOW = 0.5
"""Share of the full bytes from which a version is stored whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One push, seen alike by every rank."""

    outcomes: tuple[EngineOutcome, ...]
    num_bytes: int
    """Put into the store; 0 where the version was there already."""
    num_tensors: int
    num_parts: int
    seconds: Mapping[str, float]


class _Said(NamedTuple):
    """What a rank tells the others first."""

    version: int
    digest: str
    base: int | None


class _Order(NamedTuple):
    """What the leader decides."""

    kind: Literal["full", "delta"] | None
    """None: the version is in the store."""
    reason: str


class StoredPushes:
    """The state that lasts between pushes: the plan, and a copy of what this rank put last, the base of deltas."""

    def __init__(self, ranks: Ranks, config: PushConfig, api_key: str | None) -> None:
        assert config.store is not None, "PushConfig asks for it"
        self._ranks, self._config, self._api_key, self._url = ranks, config, api_key, config.store
        self._opened: DeltaStore | None = None
        self._planned: tuple[tuple[str, ...], tuple[Stored, ...]] | None = None
        self._copy: dict[str, Bits] = {}
        self._base: int | None = None
        """Version that `_copy` is of."""
        self._identity = ""
        """Of that version, on the leader: another trainer may have put one of the same number."""

    def push(self, shards: Iterable[ShardLike], version: int, urls: Sequence[str]) -> Result:
        """Collective over the ranks.

        Raises:
            ShardError: the shards do not make whole tensors. The store is as before.
            SyncError: the store or a rank failed; nothing was published, or all of the version.
        """
        ranks = self._ranks
        start = time.monotonic()
        blocks: dict[ShardSpec, torch.Tensor] = {}
        said_R = ranks.agree("prepare", lambda: self._read(shards, version, blocks))
        if len({said.version for said in said_R}) > 1:
            raise SyncError(f"The ranks push different versions: {[s.version for s in said_R]}.", phase="prepare")
        plan = self._plan(said_R, list(blocks))
        mine = [stored for stored in plan if stored.rank == ranks.rank]
        base = self._base if len({said.base for said in said_R}) == 1 else None
        order = ranks.agree("prepare", lambda: self._decide(version, base, plan) if ranks.is_leader else None)[0]
        assert order is not None
        if order.kind is None:
            ranks.agree("write", lambda: self._compare(version, mine, blocks))
            num_bytes = 0
        else:
            order, num_bytes = self._put(version, base, order, plan, mine, blocks)
        if self._config.delta != "off" and self._base != version:
            ranks.agree("write", lambda: self._keep(version, mine, blocks))
        written = time.monotonic() - start
        ranks.agree("write", lambda: self._prune() if ranks.is_leader else None)

        def wait() -> tuple[EngineOutcome, ...]:
            return wait_for_engines(
                urls,
                version,
                store=self._url,
                timeout_s=self._config.timeout_s,
                api_key=self._api_key,
                kind=order.kind,
                reason=order.reason,
            )

        outcomes = ranks.agree("load", lambda: wait() if ranks.is_leader else ())[0]
        return Result(
            outcomes=outcomes,
            num_bytes=num_bytes,
            num_tensors=len({stored.spec.name for stored in plan}),
            num_parts=len(plan),
            seconds={"write": written},
        )

    def close(self) -> None:
        """Let go of the copy."""
        self._copy.clear()
        self._base = None

    @property
    def _store(self) -> DeltaStore:
        if self._opened is None:  # late: what is wrong with the URL is to be told by all ranks
            self._opened = DeltaStore(self._url)
        return self._opened

    def _read(self, shards: Iterable[ShardLike], version: int, blocks: dict[ShardSpec, torch.Tensor]) -> _Said:
        blocks.update(collect(shards))
        return _Said(version, hashlib.sha256(repr(list(blocks)).encode()).hexdigest(), self._base)

    def _plan(self, said_R: Sequence[_Said], specs: list[ShardSpec]) -> tuple[Stored, ...]:
        digests = tuple(said.digest for said in said_R)
        if self._planned is None or self._planned[0] != digests:
            specs_R = self._ranks.agree("prepare", lambda: specs)
            dtype = None if self._config.dtype in ("auto", "keep") else self._config.dtype
            self._planned = digests, plan_parts(specs_R, dtype=dtype)
            self.close()  # this rank may put other parts from now on
        return self._planned[1]

    # ---- what to publish

    def _decide(self, version: int, base: int | None, plan: Sequence[Stored]) -> _Order:
        """Leader: full, delta, or nothing at all."""
        store = self._store
        if version == store.latest():
            if store.manifest(version).metadata.get(METADATA) != describe(plan):
                raise StoreError(_other_contents(version, "other tensors or shards"))
            return _Order(None, "the version is in the store")
        why = "this trainer has put no version of these shards yet" if base is None else ""
        if base is not None and (base != store.latest() or store.identity(base) != self._identity):
            base, why = None, f"the newest stored version is not the {base} of this trainer"
        kind, reason = store.kind_for(version, base=base)
        self._tidy(lambda: store.forget(version))
        if kind == "delta":
            if self._config.delta == "off":
                return _Order("full", "`delta = off`")
            assert base is not None, "kind_for allows a delta on the newest version only"
            if store.manifest(base).metadata.get(METADATA) != describe(plan):
                return _Order("full", f"the tensors or shards are not those of version {base}")
        return _Order(kind, why or reason)

    def _compare(self, version: int, mine: Sequence[Stored], blocks: Mapping[ShardSpec, torch.Tensor]) -> None:
        """A version that is there already must be what is pushed: after a failed wait, or when a trainer restarts."""
        chain = None if self._base == version else self._store.chain(None, version)

        def compare(stored: Stored) -> None:
            there = self._copy[stored.part] if chain is None else self._store.restore(chain, stored.part)
            if not np.array_equal(there, bits(blocks[stored.held], stored.spec.dtype)):
                raise StoreError(_other_contents(version, f"other values of {stored.part}"))

        each(compare, mine, nbytes=_nbytes, limit=self._config.max_inflight_bytes)

    # ---- writing

    def _put(
        self,
        version: int,
        base: int | None,
        order: _Order,
        plan: Sequence[Stored],
        mine: Sequence[Stored],
        blocks: Mapping[ShardSpec, torch.Tensor],
    ) -> tuple[_Order, int]:
        """Collective: write the parts of all ranks and publish them. Returns what it became, and its bytes."""
        ranks = self._ranks
        blobs: dict[str, bytes | None] = {}
        if order.kind == "delta":
            sizes_R = ranks.agree("write", lambda: self._encode(mine, blocks, blobs))
            share = sum(size for size, _ in sizes_R) / sum(size for _, size in sizes_R)
            if share > _PAYS_BELOW:
                order = _Order("full", f"a delta would have {share:.0%} of the bytes")
        is_delta = order.kind == "delta"

        def put(stored: Stored) -> Part:
            new = bits(blocks[stored.held], stored.spec.dtype)
            if not is_delta:
                return self._store.put_full(version, stored.part, new)
            blob = blobs.pop(stored.part)
            if blob is None:  # does not pay by itself, but the version is a delta
                blob = encode(self._copy[stored.part], new, codec=self._codec)
            return self._store.put_delta(version, stored.part, blob)

        limit = self._config.max_inflight_bytes
        parts_R = ranks.agree("write", lambda: each(put, mine, nbytes=_nbytes, limit=limit))
        parts = [part for parts in parts_R for part in parts]
        ranks.agree("write", lambda: self._publish(version, base, is_delta, parts, plan) if ranks.is_leader else None)
        return order, sum(part.nbytes for part in parts)

    def _encode(
        self, mine: Sequence[Stored], blocks: Mapping[ShardSpec, torch.Tensor], blobs: dict[str, bytes | None]
    ) -> tuple[int, int]:
        """Make the deltas of this rank. Returns the bytes of what pays, part by part, and those of everything."""

        def make(stored: Stored) -> int:
            new = bits(blocks[stored.held], stored.spec.dtype)
            choice = choose(self._copy[stored.part], new, codec=self._codec, max_ratio=_PAYS_BELOW)
            blobs[stored.part] = choice.blob
            return choice.nbytes

        sizes = each(make, mine, nbytes=_nbytes, limit=self._config.max_inflight_bytes)
        return sum(sizes), sum(stored.nbytes for stored in mine)

    def _publish(
        self, version: int, base: int | None, is_delta: bool, parts: Sequence[Part], plan: Sequence[Stored]
    ) -> None:
        self._store.publish(
            version,
            parts,
            kind="delta" if is_delta else "full",
            base=base if is_delta else None,
            metadata={METADATA: describe(plan)},
        )

    @property
    def _codec(self) -> Literal["fast", "small"]:
        assert self._config.delta != "off"
        return self._config.delta

    def _keep(self, version: int, mine: Sequence[Stored], blocks: Mapping[ShardSpec, torch.Tensor]) -> None:
        """Copy what this rank put, as the base of the next delta."""
        self._base = None  # a copy that breaks off is the base of nothing
        for part in self._copy.keys() - {stored.part for stored in mine}:
            del self._copy[part]
        for stored in mine:
            new = bits(blocks[stored.held], stored.spec.dtype)
            old = self._copy.get(stored.part)
            if old is not None and (old.dtype, old.size) == (new.dtype, new.size):
                np.copyto(old, new)
            else:
                self._copy[stored.part] = new.copy()
        if self._ranks.is_leader:
            self._identity = self._store.identity(version)
        self._base = version

    def _prune(self) -> None:
        self._tidy(lambda: self._store.prune(keep_fulls=self._config.store_keep))

    def _tidy(self, remove: Callable[[], object]) -> None:
        try:
            remove()
        except OSError as error:  # StoreError is one. The next push tries again
            warnings.warn(f"{self._url} could not be pruned: {error}", stacklevel=3)


def _nbytes(stored: Stored) -> int:
    return stored.nbytes


def _other_contents(version: int, what: str) -> str:
    return (
        f"Version {version} is in the store already, with {what}. Push a later version, or use another store for "
        "another run."
    )
