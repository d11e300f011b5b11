"""Routed experts: which experts each token of a trajectory went through, in the smallest form. Usable alone.

A delta holds rows for consecutive input tokens of one trajectory. Row i belongs to input token i: what the model chose
when it read token i to predict the next. So a call on P tokens that samples C more has rows [0, P + C - 1), the last
sampled token has none yet, and the next turn begins with its row.

    turn 1   rows [0, 11)           prompt of 5, 7 sampled
    turn 2   rows [11, 20)          from the last token sampled in turn 1 on

Subscripts: N rows, T tokens of a trajectory, L layers with experts, K experts a token.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from miles_tito.errors import RecordError, WireError
from miles_tito.records.arrays import readonly

_MAGIC = b"MREX"
_SCHEMA = 1
_HEADER = struct.Struct("<4sBBHHIqqI")
"""Magic, schema, bytes an id, layers, experts a token, rows, first row, weight version, CRC-32 of all but itself."""
_TYPES = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Which layers of a mixture-of-experts model route tokens, and among how many experts.

    Read off the model's folder when a server or a trainer starts; `SGLangEngine` needs it to read the engine's answers.
    """

    num_layers: int
    """All layers; an engine reports the dense ones as well."""
    layers: tuple[int, ...]
    """Those with experts."""
    num_experts: int
    """Of one layer, shared ones not counted."""
    experts_per_token: int

    def __post_init__(self) -> None:
        if not self.layers or not 0 <= min(self.layers) <= max(self.layers) < self.num_layers:
            raise RecordError(f"Layers with experts {self.layers} must lie in [0, {self.num_layers}), at least one.")
        if not 0 < self.experts_per_token <= self.num_experts:
            raise RecordError(f"{self.experts_per_token} experts a token of {self.num_experts} cannot be.")

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every expert id."""
        return smallest_unsigned(self.num_experts - 1)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ExpertLayout | None:
        """Read off a model's `config.json`; None for a dense model.

        Raises:
            RecordError: experts are configured, but not where.
        """
        config = cast("Mapping[str, Any]", config.get("text_config") or config)
        num_experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        if not num_experts:
            return None
        num_layers = _first(config, "num_hidden_layers", "num_layers")
        per_token = _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token")
        if not num_layers or not per_token:
            raise RecordError(f"`config.json` names {num_experts} experts but no layers or no experts a token.")
        layers = tuple(i for i in range(num_layers) if _routes(config, i))
        return ExpertLayout(num_layers=num_layers, layers=layers, num_experts=num_experts, experts_per_token=per_token)

    @staticmethod
    def from_folder(path: str | Path) -> ExpertLayout | None:
        """Read off the `config.json` in a model folder; None for a dense model."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise RecordError(f"{path} has no `config.json` to read the experts' layers from.")
        return ExpertLayout.from_config(json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedDelta:
    """The experts that consecutive input tokens of one trajectory were routed to, as one engine call reports them."""

    start: int
    """The token of the first row."""
    experts: np.ndarray
    """[N, L, K] smallest unsigned type, in the router's order."""
    layers: tuple[int, ...]
    """Layer ids of the second axis."""
    version: int
    """Of the weights that routed."""

    def __post_init__(self) -> None:
        experts = readonly(self.experts, None, "experts", ndim=3)
        if experts.dtype.kind != "u" or experts.shape[1] != len(self.layers) or self.start < 0:
            raise RecordError(
                f"A delta from token {self.start} has shape {experts.shape} and type {experts.dtype}; with "
                f"{len(self.layers)} layers it must be [N, {len(self.layers)}, K] unsigned, from 0 or later."
            )
        object.__setattr__(self, "experts", experts)

    @property
    def end(self) -> int:
        return self.start + len(self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a whole trajectory, put together from the deltas of its turns when it is handed out."""

    experts: np.ndarray
    """[T, L, K]; 0 in rows that are missing."""
    mask: np.ndarray
    """[T] bool, False where a row is missing: always the last."""
    layers: tuple[int, ...]

    def take(self, *, rows: np.ndarray | slice | None = None, layers: Iterable[int] | None = None) -> RoutedExperts:
        """What one rank needs.

        Args:
            rows: its tokens, see `context_rows`; None for all.
            layers: ids of its layers; those without experts are passed over. None for all.
        """
        chosen = self.layers if layers is None else tuple(sorted(set(layers) & set(self.layers)))
        columns = [self.layers.index(layer) for layer in chosen]
        rows = slice(None) if rows is None else rows
        return RoutedExperts(experts=self.experts[rows][:, columns], mask=self.mask[rows], layers=chosen)


def smallest_unsigned(largest: int) -> np.dtype:
    """The smallest unsigned type that holds `largest`."""
    return np.dtype(np.uint8) if largest < 2**8 else np.dtype(np.uint16) if largest < 2**16 else np.dtype(np.uint32)


def read_engine(payload: str | None, layout: ExpertLayout, *, start: int, num_rows: int, version: int) -> RoutedDelta:
    """The delta in an SGLang answer: base64 of int32 `[rows, all layers, K]` from token `start` on.

    Rows that the payload lacks are lacking in the delta, and so is a last row that was cut.

    Raises:
        RecordError: more rows than the call has tokens, or ids of no expert: the layout is of another model.
    """
    try:
        data = base64.b64decode(payload or "", validate=True)
    except binascii.Error as error:
        raise RecordError(f"`routed_experts` is no base64: {error}.") from error
    width = layout.num_layers * layout.experts_per_token
    rows = len(data) // (4 * width)
    if rows > num_rows:
        raise RecordError(
            f"`routed_experts` has {len(data)} bytes, {rows} rows of {layout.num_layers} layers x "
            f"{layout.experts_per_token}, but the call has {num_rows} rows; is the layout of another model?"
        )
    ids = np.frombuffer(data, "<i4", count=rows * width).reshape(rows, layout.num_layers, layout.experts_per_token)
    ids = ids[:, list(layout.layers)]
    if ids.size and not (ids.min() >= 0 and ids.max() < layout.num_experts):
        raise RecordError(
            f"`routed_experts` names experts {ids.min()} to {ids.max()} of {layout.num_experts}; is the layout of "
            "another model?"
        )
    return RoutedDelta(start=start, experts=ids.astype(layout.dtype), layers=layout.layers, version=version)


def encode_delta(delta: RoutedDelta) -> bytes:
    """`delta` as self-describing bytes."""
    rows, layers, per_token = delta.experts.shape
    item = delta.experts.dtype.itemsize
    body = np.asarray(delta.layers, "<u2").tobytes() + delta.experts.astype(_TYPES[item], copy=False).tobytes()
    header = _HEADER.pack(_MAGIC, _SCHEMA, item, layers, per_token, rows, delta.start, delta.version, 0)
    return header[:-4] + _check(header, body).to_bytes(4, "little") + body


def decode_deltas(data: bytes | memoryview) -> list[RoutedDelta]:
    """All deltas in `data`, one behind the other; their arrays are views of it.

    Raises:
        WireError: torn, foreign or damaged bytes.
    """
    deltas: list[RoutedDelta] = []
    at = 0
    while at < len(data):
        if len(data) - at < _HEADER.size:
            raise WireError(f"Routed experts end {len(data) - at} bytes into a header of {_HEADER.size}.")
        magic, schema, item, layers, per_token, rows, start, version, check = _HEADER.unpack_from(data, at)
        if magic != _MAGIC or schema != _SCHEMA or item not in _TYPES:
            raise WireError(f"At byte {at} begin no routed experts of schema {_SCHEMA}: {magic!r}, schema {schema}.")
        size = 2 * layers + item * rows * layers * per_token
        body = memoryview(data)[at + _HEADER.size : at + _HEADER.size + size]
        if len(body) < size or _check(data[at : at + _HEADER.size], body) != check:
            raise WireError(f"Routed experts from token {start} are damaged: {len(body)} of {size} bytes, or changed.")
        experts = np.frombuffer(body, _TYPES[item], offset=2 * layers).reshape(rows, layers, per_token)
        ids = tuple(int(i) for i in np.frombuffer(body, "<u2", count=layers))
        deltas.append(RoutedDelta(start=start, experts=experts, layers=ids, version=version))
        at += _HEADER.size + size
    return deltas


def assemble(deltas: Sequence[RoutedDelta], num_tokens: int) -> RoutedExperts | None:
    """The rows of a trajectory of `num_tokens`; None without a single row.

    The first delta that holds a row wins: what was sampled went through those experts, not through the ones that new
    weights chose when the engine read it again.

    Raises:
        RecordError: deltas of different models, or rows beyond the tokens.
    """
    if not any(len(delta.experts) for delta in deltas):
        return None
    first = deltas[0]
    per_token = first.experts.shape[2]
    dtype = max((delta.experts.dtype for delta in deltas), key=lambda dtype: dtype.itemsize)
    experts = np.zeros((num_tokens, len(first.layers), per_token), dtype)
    mask = np.zeros(num_tokens, np.bool_)
    for delta in deltas:
        if delta.layers != first.layers or delta.experts.shape[2] != per_token or delta.end > num_tokens:
            raise RecordError(
                f"Routed experts of tokens [{delta.start}, {delta.end}) have layers {delta.layers} and "
                f"{delta.experts.shape[2]} experts a token; the trajectory has {num_tokens} tokens, layers "
                f"{first.layers} and {per_token}."
            )
        new = ~mask[delta.start : delta.end]
        experts[delta.start : delta.end][new] = delta.experts[new]
        mask[delta.start : delta.end] = True
    return RoutedExperts(experts=experts, mask=mask, layers=first.layers)


def context_rows(num_tokens: int, *, rank: int, size: int, zigzag: bool = True) -> np.ndarray:
    """[N] tokens of one rank of a context- or sequence-parallel group, in the order that it holds them.

    Args:
        num_tokens: padded to a multiple of `size`, or of twice that with `zigzag`.
        zigzag: as causal attention is balanced: of twice `size` chunks a rank holds number `rank` from either end.
    """
    parts = 2 * size if zigzag else size
    if not 0 <= rank < size or num_tokens % parts:
        raise RecordError(f"{num_tokens} tokens do not part among rank {rank} of {size} in {parts} equal chunks.")
    chunks = np.arange(num_tokens).reshape(parts, -1)
    return np.concatenate([chunks[rank], chunks[parts - 1 - rank]]) if zigzag else chunks[rank]


def overlap(ours: RoutedExperts, theirs: RoutedExperts) -> np.ndarray:
    """[L] share of the rows that both have in which a layer chose exactly the same set of experts; NaN without rows."""
    if ours.layers != theirs.layers or ours.experts.shape != theirs.experts.shape:
        raise RecordError(
            f"Routed experts of shapes {ours.experts.shape} and {theirs.experts.shape} on layers {ours.layers} and "
            f"{theirs.layers} cannot be compared."
        )
    both = ours.mask & theirs.mask
    if not both.any():
        return np.full(len(ours.layers), np.nan)
    same = np.sort(ours.experts[both], axis=2) == np.sort(theirs.experts[both], axis=2)
    return same.all(axis=2).mean(axis=0)


def _check(header: bytes | memoryview, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(header[:-4]))


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, as the model families say it."""
    if isinstance(config.get("moe_layer_freq"), list):
        return bool(config["moe_layer_freq"][layer])
    if isinstance(config.get("mlp_layer_types"), list):
        return config["mlp_layer_types"][layer] == "sparse"
    if layer in (config.get("mlp_only_layers") or ()) or layer < int(config.get("first_k_dense_replace") or 0):
        return False
    if "decoder_sparse_step" in config:  # Qwen counts layers from 1
        return (layer + 1) % int(config["decoder_sparse_step"] or 1) == 0
    return layer % int(config.get("moe_layer_freq") or 1) == 0
