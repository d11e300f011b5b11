"""Records as bytes: msgpack for everything, safetensors for samples. Both carry a schema version.

msgpack: `["miles", version, type name, many, payload]`; a record is a map of its fields, an array an extension of
dtype, shape and raw bytes. Decoding runs each record's own validation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from miles_tito.errors import MilesError, WireError
from miles_tito.shared.safetensors import read_tensors, write_tensors

from .episodes import Episode, EpisodeResult, FailedAttempt, Group
from .prompts import Policy, Prompt, Sampling
from .summary import EpisodeSummary, GroupRef, TrajectorySummary
from .trajectories import Sample, Trajectory, VersionSpan

SCHEMA_VERSION = 1
"""Raised whenever a field's meaning changes or a field appears that an older reader must not miss."""

_MAGIC = "miles"
_ARRAY = 1
"""msgpack extension type of a numpy array."""

R = TypeVar("R")

_RECORDS: tuple[type[Any], ...] = (
    *(Sampling, Prompt, Policy, EpisodeResult, VersionSpan, Trajectory, FailedAttempt, Episode, Group, Sample),
    *(TrajectorySummary, EpisodeSummary, GroupRef),
)
"""What may be encoded."""


def encode(record: Any) -> bytes:
    """One record as msgpack bytes."""
    return _pack(cast("type[Any]", type(record)), record, many=False)


def encode_many(records: Sequence[Any], cls: type[Any]) -> bytes:
    """Records of one type as msgpack bytes."""
    for record in records:
        if type(record) is not cls:
            raise WireError(f"encode_many got a {type(record).__name__} among {len(records)} of {cls.__name__}.")
    return _pack(cls, list(records), many=True)


def decode(data: bytes | memoryview, cls: type[R]) -> R:
    """The record in `data`.

    Raises:
        WireError: torn, foreign or newer bytes, or another type than `cls`.
        RecordError: the fields contradict one another.
    """
    return cast("R", _build(cls, _unpack(data, cls, many=False)))


def decode_many(data: bytes | memoryview, cls: type[R]) -> tuple[R, ...]:
    """The records that `encode_many` wrote; raises like `decode`."""
    return tuple(cast("R", _build(cls, item)) for item in _unpack(data, cls, many=True))


def encode_samples(samples: Sequence[Sample], dropped: Sequence[Any] = ()) -> bytes:
    """Samples and the turns left out as a plain msgpack map; arrays as in records, so any msgpack reader can."""
    body = {"schema": SCHEMA_VERSION, "samples": samples, "dropped": dropped}
    return msgspec.msgpack.encode(body, enc_hook=array_to_extension)


def decode_samples(data: bytes | memoryview) -> tuple[list[Sample], list[dict[str, Any]]]:
    """What `encode_samples` wrote: the samples, and each turn left out as `{"node", "why"}`."""
    try:
        body = msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=array_from_extension)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{len(data)} bytes are no whole answer of samples: {error}.") from error
    _check_version(body.get("schema"))
    return [cast("Sample", _build(Sample, row)) for row in body["samples"]], body["dropped"]


def samples_to_safetensors(samples: Sequence[Sample]) -> bytes:
    """`samples` as one safetensors file: `<row>.<field>` tensors, everything else as JSON in the metadata.

    Raises:
        WireError: a sample's metadata does not survive JSON.
    """
    tensors: dict[str, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for index, sample in enumerate(samples):
        row: dict[str, Any] = {}
        for field in dataclasses.fields(sample):
            value = getattr(sample, field.name)
            if isinstance(value, np.ndarray):
                tensors[f"{index}.{field.name}"] = value
            else:
                row[field.name] = value
        rows.append(row)
    text = msgspec.json.encode(rows, enc_hook=_plain_scalar)
    for index, (sample, row) in enumerate(zip(samples, msgspec.json.decode(text), strict=True)):
        if row["metadata"] != dict(sample.metadata):
            raise WireError(
                f"`metadata` of sample {sample.id} (row {index}) does not survive JSON; keep it to plain strings, "
                "numbers, lists and maps, or use msgpack."
            )
    return write_tensors(tensors, {"format": "miles-samples", "schema": str(SCHEMA_VERSION), "samples": text.decode()})


def samples_from_safetensors(data: bytes | memoryview) -> list[Sample]:
    """The samples that `samples_to_safetensors` wrote; their arrays are views of `data`."""
    tensors, metadata = read_tensors(data)
    if metadata.get("format") != "miles-samples":
        raise WireError(f"This safetensors file holds no samples: its format is {metadata.get('format')!r}.")
    schema = metadata.get("schema", "")
    _check_version(int(schema) if schema.isdigit() else 0)
    try:
        rows = msgspec.json.decode(metadata.get("samples", ""), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise WireError(f"The sample table of this safetensors file is damaged: {error}.") from error
    for key, array in tensors.items():
        row, _, field = key.partition(".")
        if not row.isdigit() or int(row) >= len(rows):
            raise WireError(f"Tensor {key!r} belongs to none of the {len(rows)} samples of this file.")
        rows[int(row)][field] = array
    return [cast("Sample", _build(Sample, row)) for row in rows]


def _pack(cls: type[Any], payload: Any, *, many: bool) -> bytes:
    if cls not in _RECORDS:
        raise WireError(f"{cls.__name__} is no wire record; these are: {', '.join(c.__name__ for c in _RECORDS)}.")
    for ref in (payload if many else [payload]) if cls is GroupRef else []:
        if ref.handle is not None:
            raise WireError(
                f"GroupRef {ref.id} carries a {type(ref.handle).__name__} as handle, which means nothing in another "
                "process; send `dataclasses.replace(ref, handle=None)`."
            )
    try:
        return msgspec.msgpack.encode(
            [_MAGIC, SCHEMA_VERSION, cls.__name__, many, payload], enc_hook=array_to_extension
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"A {cls.__name__} cannot be encoded: {error}") from error


def _unpack(data: bytes | memoryview, cls: type[Any], *, many: bool) -> Any:
    try:
        envelope = msgspec.msgpack.decode(data, ext_hook=array_from_extension)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{len(data)} bytes are no whole record, torn or damaged: {error}.") from error
    parts = cast("list[Any]", envelope) if isinstance(envelope, list) else []
    if len(parts) < 2 or parts[0] != _MAGIC:
        raise WireError(f"{len(data)} bytes hold no Miles record.")
    _check_version(parts[1])
    if len(parts) != 5:
        raise WireError(f"A record envelope of schema {SCHEMA_VERSION} has 5 parts, not {len(parts)}.")
    _, _, name, got_many, payload = parts
    if name != cls.__name__ or got_many is not many:
        raise WireError(
            f"These bytes hold {'many' if got_many else 'one'} {name}, not {'many' if many else 'one'} {cls.__name__}."
        )
    return payload


def _check_version(version: Any) -> None:
    if version != SCHEMA_VERSION:
        hint = "upgrade miles-tito here" if isinstance(version, int) and version > SCHEMA_VERSION else "re-create it"
        raise WireError(f"Written with wire schema {version!r}; this miles-tito reads {SCHEMA_VERSION}: {hint}.")


def array_to_extension(value: Any) -> Any:
    """msgspec's `enc_hook` for arrays and numpy scalars."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray", value)
        if array.dtype.hasobject:
            raise TypeError(f"an array of type {array.dtype} holds Python objects.")
        head = msgspec.msgpack.encode([array.dtype.str, array.shape])
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return msgspec.msgpack.Ext(_ARRAY, b"".join((len(head).to_bytes(2, "little"), head, body)))
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return cast("np.generic", value).item()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    raise TypeError(f"a value of type {type(value).__name__} is not plain data: {value!r:.80}.")


def array_from_extension(code: int, data: memoryview) -> np.ndarray:
    """msgspec's `ext_hook` for what `array_to_extension` wrote."""
    if code != _ARRAY:
        raise WireError(f"Unknown msgpack extension {code}; this miles-tito knows {_ARRAY} (array).")
    try:
        size = int.from_bytes(data[:2], "little")
        dtype_name, shape = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[str, tuple[int, ...]])
        dtype = np.dtype(dtype_name)
        body = data[2 + size :]
        if math.prod(shape) * dtype.itemsize != len(body):
            raise WireError(f"An array of shape {shape} and type {dtype} does not take {len(body)} bytes.")
        array = np.frombuffer(body, dtype).reshape(shape)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"An array extension of {len(data)} bytes is damaged: {error}.") from error
    # A message puts arrays at any offset; libraries below numpy want them aligned.
    return array if array.flags.aligned else array.copy()


def _build(cls: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"A {cls.__name__} is a map of fields on the wire, not a {type(value).__name__}.")
    known = {field.name: field for field in dataclasses.fields(cls)}
    fields = cast("dict[str, Any]", value)
    unknown = [name for name in fields if name not in known]
    missing = [
        name
        for name, field in known.items()
        if name not in fields and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if unknown or missing:
        raise WireError(f"Fields of this {cls.__name__}: unknown {unknown}, missing {missing}.")
    converters = _converters(cls)
    built = {
        name: converters[name](item) if name in converters and item is not None else item
        for name, item in fields.items()
    }
    try:
        return cls(**built)
    except MilesError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise WireError(f"The fields of this {cls.__name__} have wrong types: {error}.") from error


@functools.cache
def _converters(cls: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Field -> what turns its plain value back into its type, for those that are no plain data."""
    found = {name: _converter(hint) for name, hint in get_type_hints(cls).items()}
    return {name: converter for name, converter in found.items() if converter}


def _converter(hint: Any) -> Callable[[Any], Any] | None:
    choices = [hint, *get_args(hint)] if get_origin(hint) is UnionType else [hint]
    for kind in choices:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return functools.partial(_build, kind)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return functools.partial(_choice, kind)
        if get_origin(kind) is tuple:
            return functools.partial(_tuple, _converter(get_args(kind)[0]))
    return None


def _tuple(converter: Callable[[Any], Any] | None, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise WireError(f"Expected a list of records, got a {type(value).__name__}.")
    items = cast("list[Any]", value)
    return tuple(map(converter, items)) if converter else tuple(items)


def _choice(cls: type[StrEnum], value: Any) -> StrEnum:
    try:
        return cls(value)
    except ValueError as error:
        raise WireError(f"{value!r} is no {cls.__name__}; known: {', '.join(cls)}.") from error
