"""One version from the trainer's shards into every engine, or a clear account of what failed.

```
 every rank   shards ─▶ plan ─▶ write bucket 0 ─▶ write bucket 1 ─▶ …                    ┌▶ report, or the same error
 leader         probe             │ pause, flush,     │                                  │  on every rank
                                  │ begin, load 0     │ load 1 …   end ─▶ verify ─▶ stamp ─▶ resume
```
The weights in an engine change in place. From its first bucket until its checksums are right it is paused, and it stays
paused when anything fails: no token ever comes from a mixed model. The next complete push recovers it.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from .adapter import AdapterOrder, AdapterPushes
from .buckets import ALIGN_BYTES, Bucket, make_buckets
from .collective import Ranks, host_id
from .config import PushConfig
from .disk import MappedFile, VersionFolder
from .errors import PushConfigError, ShardError, SyncError, WeightSyncError
from .fleet import Fleet
from .guard import exclusive
from .layout import ShardSpec
from .report import PHASES, EngineOutcome, SyncReport, summarize
from .shard import ShardLike, collect
from .shm import clean_stale
from .staged import Differences, StagedPushes
from .staging import NUM_STAGES, Staging, write_bucket
from .stored.publish import StoredPushes
from .urls import engine_urls

Blocks = dict[ShardSpec, torch.Tensor]


class Pusher:
    """Sends the weights of one trainer to a set of engines. One on every trainer rank, over the same process group."""

    def __init__(
        self,
        engines: Sequence[str],
        *,
        config: PushConfig,
        group: dist.ProcessGroup | None = None,
        api_key: str | None = None,
    ) -> None:
        """Collective over the group.

        Args:
            engines: base URLs of SGLang servers; the first rank of the group talks to them.
            config: how to push.
            group: the trainer's ranks; the default group when None, or just this process without torch.distributed.
            api_key: sent to every engine.
        """
        if config.way == "disk" and config.disk_dir is None:
            raise PushConfigError("`way = disk` needs `disk_dir`, a folder that trainer and engines see.")
        self._config = config
        self._api_key = api_key
        self._ranks = Ranks(group, timeout_s=config.timeout_s)
        self._check_alike()
        self._staging = Staging(self._ranks, kind=config.staging)
        self._staged = StagedPushes(self._ranks, config, api_key) if config.way == "staged" else None
        self._stored = StoredPushes(self._ranks, config, api_key) if config.way == "store" else None
        self._adapters = AdapterPushes(self._ranks, timeout_s=config.timeout_s, api_key=api_key)
        self._busy = threading.Lock()
        self._version: int | None = None
        self._planned: tuple[object, tuple[Bucket, ...]] | None = None
        self._trusted: dict[str, frozenset[str]] = {}
        self._seconds: dict[str, float] = {}
        self._warned = False
        self.set_engines(engines)
        clean_stale()

    def _check_alike(self) -> None:
        """Ranks that push in different ways would wait for one another."""
        said_R = self._ranks.agree("prepare", lambda: self._config)
        for field in fields(PushConfig):
            values = [getattr(said, field.name) for said in said_R]
            if field.name != "listen_host" and len(set(values)) > 1:  # that one is the leader's
                raise PushConfigError(f"The ranks have different settings: `{field.name}` is {values}.")

    def set_engines(self, engines: Sequence[str]) -> None:
        """Push to these from now on; call it on every rank when engines come or go."""
        self._engines = engine_urls(engines)

    def push(self, shards: Iterable[ShardLike], *, version: int) -> SyncReport:
        """Bring every engine to `version`. Collective over the group; returns, or raises, alike on every rank.

        Args:
            shards: what this rank holds. Replicas are fine; together the ranks must hold every tensor whole.
            version: not smaller than that of any earlier push, failed ones included.

        Raises:
            ShardError: the shards do not make whole tensors. No engine was touched.
            SyncError: an engine or a rank failed. Engines that failed are paused and hold no usable weights until a
                later push succeeds; the others serve `version`. `engines` says which is which (on the leader). In the
                `store` way engines that are not there yet go on with what they serve.
        """
        if not self._busy.acquire(blocking=False):
            raise SyncError("Another push of this Pusher is running; pushes must follow one another.", phase="prepare")
        try:
            if self._staged is not None:
                return self._push_staged(self._staged, shards, version)
            if self._stored is not None:
                return self._push_stored(self._stored, shards, version)
            return self._push(shards, version)
        except BaseException:
            self._staging.close()
            raise
        finally:
            self._busy.release()

    def push_adapter(
        self, shards: Iterable[ShardLike], *, name: str, version: int, adapter_config: Mapping[str, object]
    ) -> SyncReport:
        """Load a LoRA adapter alone; requests name it `NAME@VERSION` as their `lora_path`. Collective.

        The version before it stays loaded for the requests that use it, older ones are unloaded.

        Args:
            shards: this rank's blocks of the adapter's tensors, under PEFT's names.
            name: of the adapter, the same for all versions.
            version: of this push.
            adapter_config: content of PEFT's `adapter_config.json`.

        Raises:
            ShardError: the shards do not make whole tensors. No engine was touched.
            SyncError: an engine or a rank failed. The others have the new version beside the old one.
        """
        if not self._busy.acquire(blocking=False):
            raise SyncError("Another push of this Pusher is running; pushes must follow one another.", phase="prepare")
        start = time.monotonic()
        try:
            self._ranks.agree("prepare", lambda: _check_number(version))
            outcomes = self._adapters.push(shards, AdapterOrder(name, version, adapter_config), self._engines)
        finally:
            self._busy.release()
        _raise_failures(outcomes, version)
        return summarize(
            version=version,
            num_bytes=max(outcome.bytes for outcome in outcomes),
            num_tensors=0,
            num_buckets=1,
            leader_seconds={},
            total_seconds=time.monotonic() - start,
            engines=outcomes,
        )

    def verify(self, shards: Iterable[ShardLike]) -> dict[str, Differences]:
        """Compare every parameter of every engine with the shards, in the `staged` way. Collective; by engine URL.

        Engines pause while they hash what they hold.

        Raises:
            SyncError: an engine cannot be asked, or a push is running.
        """
        if self._staged is None:
            raise PushConfigError(f"`verify` needs `way = staged`; this Pusher pushes by `{self._config.way}`.")
        if not self._busy.acquire(blocking=False):
            raise SyncError("A push of this Pusher is running; verify after it.", phase="verify")
        try:
            return self._staged.verify(shards, self._engines)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Give the shared memory back."""
        self._staging.close()
        if self._staged is not None:
            self._staged.close()
        if self._stored is not None:
            self._stored.close()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _push(self, shards: Iterable[ShardLike], version: int) -> SyncReport:
        start = time.monotonic()
        self._seconds = {"write": 0.0, "send": 0.0}
        with ExitStack() as held:
            fleet = Fleet(self._engines if self._ranks.is_leader else (), config=self._config, api_key=self._api_key)
            try:
                blocks, buckets, local_R = self._prepare(shards, version, fleet, held)
                if self._config.way == "tensor":
                    self._send_tensors(version, blocks, buckets, local_R, fleet)
                else:
                    self._send_folder(version, blocks, buckets, local_R, fleet)
            except WeightSyncError as error:
                fleet.cancel(getattr(error, "phase", "prepare"), "the trainer side failed")
                outcomes = fleet.finish()
                if isinstance(error, SyncError):
                    raise SyncError(f"{error}{_tell(outcomes)}", phase=error.phase, engines=outcomes) from error
                raise
            except BaseException:
                fleet.cancel("prepare", "the trainer side broke")
                raise
            outcomes = self._ranks.agree("resume", fleet.finish)[0]
            self._trusted.update(fleet.equal_names())
        _raise_failures(outcomes, version)
        self._staging.retire_handles()
        if self._config.disk_dir is not None and self._ranks.is_leader:
            VersionFolder(self._config.disk_dir, version).prune(self._config.disk_keep)
        return summarize(
            version=version,
            num_bytes=sum(slot.nbytes for bucket in buckets for slot in bucket.slots),
            num_tensors=sum(len(bucket.slots) for bucket in buckets),
            num_buckets=len(buckets),
            leader_seconds=self._seconds,
            total_seconds=time.monotonic() - start,
            engines=outcomes,
        )

    def _push_staged(self, staged: StagedPushes, shards: Iterable[ShardLike], version: int) -> SyncReport:
        start = time.monotonic()
        self._ranks.agree("prepare", lambda: self._check_version(version))
        self._version = version
        result = staged.push(shards, version, self._engines)
        _raise_failures(result.outcomes, version)
        return summarize(
            version=version,
            num_bytes=sum(outcome.bytes for outcome in result.outcomes),
            num_tensors=result.num_tensors,
            num_buckets=result.num_buckets,
            leader_seconds={phase: s for phase, s in result.seconds.items() if phase not in PHASES},
            total_seconds=time.monotonic() - start,
            engines=result.outcomes,
        )

    def _push_stored(self, stored: StoredPushes, shards: Iterable[ShardLike], version: int) -> SyncReport:
        start = time.monotonic()
        self._ranks.agree("prepare", lambda: self._check_version(version))
        self._version = version
        result = stored.push(shards, version, self._engines)
        _raise_failures(result.outcomes, version)
        return summarize(
            version=version,
            num_bytes=result.num_bytes,
            num_tensors=result.num_tensors,
            num_buckets=result.num_parts,
            leader_seconds=result.seconds,
            total_seconds=time.monotonic() - start,
            engines=result.outcomes,
        )

    def _prepare(
        self, shards: Iterable[ShardLike], version: int, fleet: Fleet, held: ExitStack
    ) -> tuple[Blocks, tuple[Bucket, ...], list[bool]]:
        """Read shards and engines, agree on what is pushed, and plan it unless the last plan still holds."""
        blocks: Blocks = {}

        def read() -> _Said:
            self._check_version(version)
            held.enter_context(exclusive(fleet.urls))
            blocks.update(collect(shards))
            fleet.probe()
            digest = hashlib.sha256(repr(list(blocks)).encode()).hexdigest()
            return _Said(version, host_id(), digest, fleet.sent_dtype(), fleet.kept())

        said_R = self._ranks.agree("prepare", read)
        if len({said.version for said in said_R}) > 1:
            raise SyncError(f"The ranks push different versions: {[s.version for s in said_R]}.", phase="prepare")
        self._version = version
        key = (tuple(said.digest for said in said_R), said_R[0].dtype, said_R[0].kept)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(list(blocks), dtype=said_R[0].dtype, kept=said_R[0].kept)
        buckets = self._planned[1]
        fleet.check(buckets)
        if self._config.verify == "checksum":
            fleet.expect()
            self._warn_once(fleet)
        return blocks, buckets, [said.host == said_R[0].host for said in said_R]

    def _plan(self, specs: list[ShardSpec], *, dtype: str | None, kept: frozenset[str]) -> tuple[Bucket, ...]:
        specs_R = self._ranks.agree("prepare", lambda: specs)
        align = ALIGN_BYTES if self._config.way == "tensor" else 1
        limit = self._config.bucket_bytes
        buckets = make_buckets(specs_R, bucket_bytes=limit, dtype=dtype, kept=kept, align=align)
        if not buckets:
            raise ShardError("No rank gave a shard; there is nothing to push.")
        return buckets

    def _send_tensors(
        self, version: int, blocks: Blocks, buckets: tuple[Bucket, ...], local_R: list[bool], fleet: Fleet
    ) -> None:
        """Stage bucket after bucket; the engines load one while the next is written."""
        ranks = self._ranks
        self._staging.ensure(buckets, is_local=local_R[ranks.rank])
        stages = self._staging.stages
        count = min(len(buckets), NUM_STAGES)
        for bucket in buckets:
            index = bucket.index % count
            if bucket.index >= count:
                ranks.agree("load", lambda i=index: fleet.wait_for(stages[i], index=i) if ranks.is_leader else None)
            if ranks.agree("load", lambda: fleet.is_lost)[0]:
                return
            data = stages[index].data if stages else None
            with self._timed("write"):
                ranks.agree("write", lambda b=bucket, d=data: write_bucket(b, d, blocks, ranks=ranks, local_R=local_R))
            if ranks.is_leader:
                with self._timed("send"):
                    if bucket.index == 0:
                        fleet.open(session=True)  # as late as possible: requests run while the first bucket is written
                    fleet.load(bucket, stages[index], index=index)
        if ranks.is_leader:
            fleet.commit(version, session=True, trusted=self._trusted)

    def _send_folder(
        self, version: int, blocks: Blocks, buckets: tuple[Bucket, ...], local_R: list[bool], fleet: Fleet
    ) -> None:
        """Write a checkpoint folder together, then let every engine load it; requests run while it is written."""
        ranks = self._ranks
        if ranks.agree("write", lambda: fleet.is_lost)[0]:
            return
        folder = VersionFolder(str(self._config.disk_dir), version)
        ranks.agree("write", lambda: folder.start() if ranks.is_leader else None)
        try:
            with self._timed("write"):
                for bucket in buckets:
                    self._write_file(folder, bucket, len(buckets), blocks, local_R, fleet)
                template = self._config.disk_template
                ranks.agree("write", lambda: folder.publish(buckets, template) if ranks.is_leader else None)
        except BaseException:
            folder.discard()
            raise
        if ranks.is_leader:
            fleet.open(session=False)
            fleet.load_disk(str(folder.final))
            fleet.commit(version, session=False, trusted=self._trusted)

    def _write_file(
        self, folder: VersionFolder, bucket: Bucket, count: int, blocks: Blocks, local_R: list[bool], fleet: Fleet
    ) -> None:
        ranks = self._ranks
        is_local = local_R[ranks.rank]
        mapped: list[MappedFile] = []

        def open_file(*, create: bool) -> None:
            if is_local and create == ranks.is_leader:
                mapped.append(folder.open(bucket, count, create=create))

        def write() -> None:
            write_bucket(bucket, mapped[0].data if mapped else None, blocks, ranks=ranks, local_R=local_R)

        def close() -> None:
            if ranks.is_leader:
                fleet.hash(bucket, mapped[0].data).result()
            for file in mapped:
                file.close()

        ranks.agree("write", lambda: open_file(create=True))
        ranks.agree("write", lambda: open_file(create=False))
        ranks.agree("write", write)
        ranks.agree("write", close)

    def _check_version(self, version: int) -> None:
        _check_number(version)
        if self._version is not None and version < self._version:
            raise SyncError(
                f"Version {version} is older than {self._version}, which was pushed before. "
                "To go back in time, make a new Pusher.",
                phase="prepare",
            )

    def _warn_once(self, fleet: Fleet) -> None:
        if fleet.unknown_architectures and not self._warned:
            self._warned = True
            warnings.warn(
                f"The parameter layout of {sorted(fleet.unknown_architectures)} is not known to the checksum check: "
                "only parameters that the engine keeps under their checkpoint name can be verified.",
                stacklevel=4,
            )

    @contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        start = time.monotonic()
        yield
        self._seconds[phase] += time.monotonic() - start


def _check_number(version: object) -> None:
    if type(version) is not int or version < 0:  # `True`, a float or text would be stamped as they are
        raise SyncError(f"The version is {version!r}; it must be a whole number, not negative.", phase="prepare")


class _Said(NamedTuple):
    """What a rank tells the others before a push."""

    version: int
    host: str
    digest: str
    dtype: str | None
    """Element type of what is sent; the leader's word counts, as for `kept`."""
    kept: frozenset[str]


def _raise_failures(outcomes: tuple[EngineOutcome, ...], version: int) -> None:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise SyncError(
            f"Version {version} did not reach {len(failed)} of {len(outcomes)} engines{_tell(outcomes)}",
            phase=failed[0].phase or "load",
            engines=outcomes,
        )


def _tell(outcomes: tuple[EngineOutcome, ...]) -> str:
    """The failed engines, and what may be expected of each."""
    lines = [
        f"{outcome.url} failed in phase `{outcome.phase}`: {outcome.error} "
        + (
            "(its weights are mixed; it stays paused"
            if outcome.written
            else "(this push left its weights as they were; not routable"
        )
        + " until a later push succeeds)"
        for outcome in outcomes
        if not outcome.ok
    ]
    return ": " + "; ".join(lines) if lines else ""
