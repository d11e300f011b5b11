"""LoRA adapters alone: a new version is loaded beside the old one, so that no request ever sees half of it.

```
 every rank   shards ─▶ one bucket in shared memory of its own
 leader        └▶ load NAME@12 on every engine ─▶ requests name it from now on ─▶ unload NAME@10
```
Nothing pauses: requests that run with `NAME@11` end with it. SGLang keeps an adapter's tensors where it found them, so
every version has memory of its own, which the engine holds until it unloads the adapter.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .buckets import Bucket, make_buckets, torch_dtype
from .collective import Ranks, host_id
from .engine import Deadline, EngineClient, is_local
from .errors import EngineRequestError, ShardError, SyncError, WeightSyncError
from .guard import exclusive
from .layout import ShardSpec
from .payload import encode
from .report import EngineOutcome
from .shard import ShardLike, collect
from .staging import Stage, Staging, write_bucket

_CONFIG_KEYS = ("r", "lora_alpha", "target_modules")

_KEPT = 2
"""Versions that stay loaded: the newest, and the one that running requests may still use."""


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """One version of one adapter."""

    name: str
    version: int
    config: Mapping[str, object]
    """Content of PEFT's `adapter_config.json`."""

    @property
    def tag(self) -> str:
        """What requests give as `lora_path`."""
        return f"{self.name}@{self.version}"


class AdapterPushes:
    """Which versions are loaded where."""

    def __init__(self, ranks: Ranks, *, timeout_s: float, api_key: str | None) -> None:
        self._ranks, self._timeout_s, self._api_key = ranks, timeout_s, api_key
        self._loaded: dict[tuple[str, str], list[str]] = {}
        """By engine and adapter, tags from old to new."""

    def push(self, shards: Iterable[ShardLike], order: AdapterOrder, urls: Sequence[str]) -> tuple[EngineOutcome, ...]:
        """Collective over the ranks. The outcomes are the same on all of them.

        Raises:
            ShardError: the shards do not make whole tensors.
            SyncError: the trainer side failed.
        """
        blocks: dict[ShardSpec, torch.Tensor] = {}

        def read() -> tuple[str, list[ShardSpec]]:
            _check_order(order)
            blocks.update(collect(shards))
            return host_id(), list(blocks)

        said_R = self._ranks.agree("prepare", read)
        buckets = make_buckets([specs for _, specs in said_R], bucket_bytes=1 << 62)
        if not buckets:
            raise ShardError("No rank gave a shard; there is no adapter to push.")
        _check_tensors(buckets[0])
        local_R = [host == said_R[0][0] for host, _ in said_R]
        staging = Staging(self._ranks, kind="shm")
        try:
            staging.ensure(buckets, is_local=local_R[self._ranks.rank])
            self._ranks.agree("write", lambda: self._write(buckets[0], staging, blocks, local_R))

            def load() -> tuple[EngineOutcome, ...]:
                if not self._ranks.is_leader:
                    return ()
                with exclusive(urls), ThreadPoolExecutor(len(urls), thread_name_prefix="push adapter") as pool:
                    stage = staging.stages[0]
                    loads = [pool.submit(self._load, url, order, buckets[0], stage) for url in urls]
                    return tuple(load.result() for load in loads)

            return self._ranks.agree("load", load)[0]
        finally:
            staging.close()

    def _write(
        self, bucket: Bucket, staging: Staging, blocks: Mapping[ShardSpec, torch.Tensor], local_R: list[bool]
    ) -> None:
        data = staging.stages[0].data if staging.stages else None
        write_bucket(bucket, data, blocks, ranks=self._ranks, local_R=local_R)

    def _load(self, url: str, order: AdapterOrder, bucket: Bucket, stage: Stage) -> EngineOutcome:
        start, deadline = time.monotonic(), Deadline(self._timeout_s)
        client = EngineClient(url, api_key=self._api_key)
        loaded = self._loaded.setdefault((url, order.name), [])
        error = reason = None
        try:
            info = client.server_info(deadline)
            _check(url, info)
            client.unload_adapter(order.tag, deadline)  # of another trainer, or one that some ranks failed to load
            if order.tag in loaded:
                loaded.remove(order.tag)
            payload_R = [encode(bucket, stage.handle(bucket)) for _ in range(int(info.get("tp_size") or 1))]
            with _all_ranks(client, len(payload_R), deadline):
                there = client.load_adapter(order.tag, order.config, payload_R, deadline)
            loaded.append(order.tag)
            # What a trainer before this one left comes first, to be unloaded first.
            loaded[:0] = [tag for tag in there if tag.startswith(f"{order.name}@") and tag not in loaded]
            reason = self._unload(client, loaded, deadline)
        except WeightSyncError as problem:
            error = str(problem)
        finally:
            client.close()
        return EngineOutcome(
            url=url,
            ok=error is None,
            phase=None if error is None else "load",
            error=error,
            seconds={"load": time.monotonic() - start},
            reason=reason,
            bytes=bucket.nbytes if error is None else 0,
            serves=order.version if error is None else None,
        )

    def _unload(self, client: EngineClient, loaded: list[str], deadline: Deadline) -> str | None:
        """Unload what is too old; the engine waits for requests that use it. What fails is tried again next time."""
        problems: list[str] = []
        for tag in loaded[:-_KEPT]:
            try:
                client.unload_adapter(tag, deadline)
                loaded.remove(tag)
            except EngineRequestError as error:
                problems.append(f"{tag} could not be unloaded and takes memory until the next push: {error}")
        return "; ".join(problems) or None


@contextmanager
def _all_ranks(client: EngineClient, tp: int, deadline: Deadline) -> Generator[None]:
    """Leave when all ranks of an engine have done what was asked inside.

    SGLang 0.5.23 answers as soon as its first rank has loaded an adapter, while others may not have opened the shared
    memory yet: gone by then, it ends their process. An update session ends when all ranks have come to it. One about
    the draft model touches no parameter of the model that serves.
    """
    if tp == 1:
        yield
        return
    client.begin(deadline, selector="draft")
    try:
        yield
    finally:
        client.end(deadline)


def _check_order(order: AdapterOrder) -> None:
    if not order.name or "@" in order.name:
        raise SyncError(f"The adapter's name is {order.name!r}; it must be some text without `@`.", phase="prepare")
    missing = [key for key in _CONFIG_KEYS if key not in order.config]
    if missing:
        raise SyncError(
            f"`adapter_config` has no {', '.join(missing)}; it is PEFT's adapter_config.json.", phase="prepare"
        )
    try:
        json.dumps(dict(order.config))
    except (TypeError, ValueError) as error:
        raise SyncError(f"`adapter_config` cannot be sent as JSON: {error}.", phase="prepare") from error


def _check_tensors(bucket: Bucket) -> None:
    """SGLang leaves out what it does not know, and an adapter of which half is missing works as another one."""
    slots = {slot.name: slot for slot in bucket.slots}
    for name, slot in slots.items():
        if not torch_dtype(slot.dtype).is_floating_point:
            raise ShardError(f"`{name}` is {slot.dtype}; the tensors of an adapter are floating-point numbers.")
        for half, other, axis in ((".lora_A.", ".lora_B.", 0), (".lora_B.", ".lora_A.", 1)):
            if half not in name:
                continue
            partner = slots.get(name.replace(half, other))
            if partner is None:
                raise ShardError(f"`{name}` was given without `{name.replace(half, other)}`; an adapter needs both.")
            if len(slot.shape) != 2 or len(partner.shape) != 2 or slot.shape[axis] != partner.shape[1 - axis]:
                raise ShardError(
                    f"`{name}` is {slot.shape} and `{partner.name}` is {partner.shape}; lora_A is (rank, inputs) and "
                    "lora_B (outputs, rank)."
                )


def _check(url: str, info: Mapping[str, object]) -> None:
    if not info.get("enable_lora"):
        raise SyncError(f"{url} was started without `--enable-lora`.", phase="load")
    if not is_local(url):
        raise SyncError("it is on another host, where shared memory does not reach.", phase="load")
