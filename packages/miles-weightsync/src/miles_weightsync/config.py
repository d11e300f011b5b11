"""How new weights travel to the engines."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

from .errors import PushConfigError

Pause = Literal["retract", "in_place", "abort"]

LOADER = f"{__package__}.receiver.load"
"""Engines that `staged` pushes reach are started with `--custom-weight-loader` and this."""

_OF_FOLLOWERS = ("pause", "verify", "bucket_bytes", "transport", "listen_host")
"""What a trainer that pushes into a store has no say in."""

_ONLY_WITH = {
    "transport": ("staged",),
    "listen_host": ("staged",),
    "delta": ("staged", "store"),
    "max_inflight_bytes": ("staged", "store"),
    "disk_keep": ("disk",),
}
"""Settings that are for some ways only."""

_MAX_TIMEOUT_S = 1e6
"""Sockets wait for 24 days at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """How a `Pusher` sends, checks and commits one version."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (read by pydantic in miles-core; no dependency here)

    way: Literal["tensor", "disk", "staged", "store"] = "tensor"
    """`tensor`: buckets through shared memory, for engines on the leader's host. `disk`: a safetensors folder that all
    machines see. `staged`: each rank writes into receivers inside the engines while requests run; see `docs`. `store`:
    each rank puts its shards into a folder or an object store, from where `miles-weightsync follow` beside each engine
    fetches them."""
    pause: Pause = "retract"
    """What happens to running requests: `retract` re-computes their prefix under the new weights, `in_place` keeps the
    old KV cache, `abort` ends them with the tokens they have."""
    verify: Literal["checksum", "none"] = "checksum"
    """Compare a checksum of every parameter with the engine's own before it may generate again."""
    dtype: Literal["auto", "keep", "float32", "bfloat16", "float16"] = "auto"
    """Element type sent. `auto`: the engine's, for the architectures with a known layout, and as the shards are in the
    `store` way; `keep`: as the shards are."""
    staging: Literal["shm", "cuda_ipc"] = "shm"
    """Where buckets are staged in the `tensor` way: host shared memory, or the leader's GPU for colocated engines."""
    bucket_bytes: int = 256 * 2**20
    """Size at which a bucket is closed; two are staged at a time. A larger tensor gets a bucket of its own."""
    transport: Literal["shm", "tcp", "mooncake", "nixl"] = "shm"
    """How bytes reach receivers in the `staged` way. `shm`: one host. The last two need their extras."""
    delta: Literal["off", "fast", "small"] = "fast"
    """Codec for what changed since the last push, in the `staged` and `store` ways. Keeps a copy of the rank's shards
    on the host; everything is sent where a delta has no base or does not pay."""
    delta_history: int = 0
    """Pushes that an engine may have missed and still gets a delta, folded into one. Each costs an encoding of the
    rank's shards after its push, and the memory of a delta; 0 sends such an engine everything."""
    max_inflight_bytes: int = 1 << 30
    """Bytes that a rank has packed and not yet delivered in the `staged` way, over all engines; in the `store` way
    bytes of the shards that it reads, encodes and puts at a time."""
    listen_host: str = "127.0.0.1"
    """Where the leader of `staged` pushes is called back; `0.0.0.0` when engines or ranks are on other hosts."""
    timeout_s: float = 300.0
    """Deadline of one push on one engine, from the first request to the last; in the `store` way from publication."""
    disk_dir: str | None = None
    """Folder for the `disk` way, seen by trainer and engines under the same path."""
    disk_keep: int = 2
    """Newest versions kept in `disk_dir`; older ones are removed after a push."""
    disk_template: str | None = None
    """Model folder whose config and tokenizer files are copied beside the weights, so each version loads on its own."""
    store: str | None = None
    """Where the `store` way puts versions: a path, or a URL of fsspec (`s3://…`; its package must be installed)."""
    store_keep: int = 1
    """Newest full versions kept in `store`, with all that follows them; what comes before is removed after a push."""

    def __post_init__(self) -> None:
        self._check_choices()
        if self.bucket_bytes < 1:
            raise PushConfigError(f"`bucket_bytes` is {self.bucket_bytes}; it must be at least 1.")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise PushConfigError(
                f"`timeout_s` is {self.timeout_s}; it must be positive, and {_MAX_TIMEOUT_S:,.0f} at most."
            )
        if self.max_inflight_bytes < 1:
            raise PushConfigError(f"`max_inflight_bytes` is {self.max_inflight_bytes}; it must be at least 1.")
        if self.delta_history < 0:
            raise PushConfigError(f"`delta_history` is {self.delta_history}; it must be at least 0.")
        if self.delta_history and (self.way != "staged" or self.delta == "off"):
            raise PushConfigError(
                f"`delta_history = {self.delta_history}` has no effect with `way = {self.way}` and "
                f"`delta = {self.delta}`; remove it."
            )
        if self.way == "staged" and self.verify == "none":
            raise PushConfigError(
                "`verify = none` has no effect with `way = staged`, which always verifies; remove it."
            )
        if self.way == "staged" and self.dtype != "auto":
            raise PushConfigError(f"`dtype = {self.dtype}` has no effect with `way = staged`; engines keep theirs.")
        if self.disk_keep < 1:
            raise PushConfigError(f"`disk_keep` is {self.disk_keep}; the version being served must be kept.")
        if self.way == "store":
            self._check_store()
        elif self.store is not None or self.store_keep != 1:
            raise PushConfigError(f"`store` and `store_keep` have no effect with `way = {self.way}`; remove them.")
        if self.way != "tensor" and self.staging != "shm":
            raise PushConfigError(f"`staging = {self.staging}` has no effect with `way = {self.way}`; remove it.")
        if self.way != "disk" and (self.disk_dir or self.disk_template):
            raise PushConfigError(
                f"`disk_dir` and `disk_template` have no effect with `way = {self.way}`; remove them."
            )
        self._check_effects()

    def _check_choices(self) -> None:
        """A misspelt `verify` must not verify nothing; where pydantic reads the settings it has looked already."""
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise PushConfigError(f"`{name}` is {value!r}; it must be one of {', '.join(get_args(hint))}.")

    def _check_effects(self) -> None:
        for field in fields(self):
            ways = _ONLY_WITH.get(field.name, (self.way,))
            value = getattr(self, field.name)
            if self.way not in ways and value != field.default:
                raise PushConfigError(
                    f"`{field.name} = {value}` has no effect with `way = {self.way}`, only with "
                    f"{' and '.join(f'`{way}`' for way in ways)}; remove it."
                )

    def _check_store(self) -> None:
        if not self.store:
            raise PushConfigError("`way = store` needs `store`, a path or a URL that trainer ranks and followers see.")
        if self.store_keep < 1:
            raise PushConfigError(f"`store_keep` is {self.store_keep}; the newest full version must be kept.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_FOLLOWERS and value != field.default:
                raise PushConfigError(
                    f"`{field.name} = {value}` has no effect with `way = store`; followers push to the engines, as "
                    "they are told. Remove it."
                )
