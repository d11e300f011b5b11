"""Layouts: which rank, on which host, holds or needs which box of which tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from ..errors import ShardError
from ..layout import Box, ShardSpec, show, volume

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "float8_e8m0fnu": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element. Packed 4-bit codes travel as uint8 or int32."""


class Block(NamedTuple):
    """One box of a tensor and every rank that has it."""

    box: Box
    ranks: tuple[int, ...]
    """Ascending."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor and where its boxes are."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]
    """No two with equal boxes, none empty. Tensors that are cut alike may share the tuple, which speeds up planning."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return volume(tuple((0, size) for size in self.shape)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """One side of a plan."""

    hosts: Mapping[int, str]
    """Host of every rank; ranks need not be contiguous."""
    tensors: Mapping[str, TensorLayout]
    """By Hugging Face name."""

    @classmethod
    def from_shards(cls, hosts: Mapping[int, str], shards: Iterable[tuple[int, ShardSpec]]) -> Layout:
        """Gather what single ranks say about themselves. Empty boxes are dropped.

        Raises:
            ShardError: ranks disagree on a tensor, a box lies outside it or is given twice by one rank.
        """
        specs: dict[str, ShardSpec] = {}
        holders: dict[str, dict[Box, list[int]]] = {}
        for rank, spec in shards:
            _check(spec, first=specs.setdefault(spec.name, spec), rank=rank)
            ranks = holders.setdefault(spec.name, {})
            if volume(spec.box) == 0:
                continue
            if rank in ranks.setdefault(spec.box, []):
                raise ShardError(f"`{spec.name}`: rank {rank} lists the box {show(spec.box)} twice.")
            ranks[spec.box].append(rank)
        shared: dict[tuple[Block, ...], tuple[Block, ...]] = {}
        tensors: dict[str, TensorLayout] = {}
        for name, spec in specs.items():
            blocks = tuple(Block(box, tuple(sorted(ranks))) for box, ranks in sorted(holders[name].items()))
            tensors[name] = TensorLayout(spec.shape, spec.dtype, shared.setdefault(blocks, blocks))
        return cls(dict(hosts), tensors)

    def without(self, ranks: Collection[int]) -> Layout:
        """What is left when ranks leave.

        Raises:
            ShardError: a rank is not in the layout.
        """
        gone = set(ranks)
        if unknown := gone - set(self.hosts):
            raise ShardError(f"Ranks {sorted(unknown)} are not in the layout; it has {len(self.hosts)} ranks.")
        shared: dict[int, tuple[Block, ...]] = {}
        tensors: dict[str, TensorLayout] = {}
        for name, tensor in self.tensors.items():
            if (blocks := shared.get(id(tensor.blocks))) is None:
                kept = (Block(box, tuple(r for r in held if r not in gone)) for box, held in tensor.blocks)
                blocks = shared[id(tensor.blocks)] = tuple(block for block in kept if block.ranks)
            tensors[name] = TensorLayout(tensor.shape, tensor.dtype, blocks)
        return Layout({rank: host for rank, host in self.hosts.items() if rank not in gone}, tensors)

    def shards(self) -> Iterator[tuple[int, ShardSpec]]:
        """(rank, shard) of every box of every rank, tensor by tensor."""
        for name, tensor in self.tensors.items():
            for box, ranks in tensor.blocks:
                spec = ShardSpec(name, tensor.shape, tensor.dtype, box)
                for rank in ranks:
                    yield rank, spec

    def to_json(self) -> dict[str, object]:
        """The content of a layout file."""
        shards: dict[int, list[dict[str, object]]] = {rank: [] for rank in self.hosts}
        for rank, spec in self.shards():
            shape, box = list(spec.shape), [list(span) for span in spec.box]
            shards[rank].append({"name": spec.name, "global_shape": shape, "dtype": spec.dtype, "box": box})
        return {"ranks": [{"rank": r, "host": self.hosts[r], "shards": held} for r, held in shards.items()]}

    @classmethod
    def from_json(cls, data: object) -> Layout:
        """Read the content of a layout file: `{"ranks": [{"rank", "host", "shards": [{"name", "global_shape", "dtype",
        "box": [[start, stop], …]}]}]}`.

        Raises:
            ShardError: a key is missing, unknown or of the wrong type, or the shards contradict one another.
        """
        hosts: dict[int, str] = {}
        shards: list[tuple[int, ShardSpec]] = []
        for position, entry in enumerate(_list(_fields(data, {"ranks"}, "the layout")["ranks"], "`ranks`")):
            where = f"ranks[{position}]"
            fields = _fields(entry, {"rank", "host", "shards"}, where)
            rank, host = _int(fields["rank"], f"{where}.rank"), _text(fields["host"], f"{where}.host")
            if rank in hosts:
                raise ShardError(f"{where}: rank {rank} is listed twice.")
            hosts[rank] = host
            for index, shard in enumerate(_list(fields["shards"], f"{where}.shards")):
                shards.append((rank, _spec(shard, f"{where}.shards[{index}]")))
        return cls.from_shards(hosts, shards)

    @classmethod
    def read(cls, path: str | Path) -> Layout:
        """Read a layout file.

        Raises:
            ShardError: the file cannot be read or is not a layout; names the file.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except RecursionError:
            raise ShardError(f"{path}: lists or objects are nested too deeply for a layout.") from None
        except (OSError, ValueError) as error:  # a ShardError is a ValueError too
            raise ShardError(f"{path}: {error}") from error


def _check(spec: ShardSpec, *, first: ShardSpec, rank: int) -> None:
    if (spec.shape, spec.dtype) != (first.shape, first.dtype):
        raise ShardError(
            f"`{spec.name}`: rank {rank} says {spec.dtype} {spec.shape}, another rank {first.dtype} {first.shape}."
        )
    if spec.dtype not in ITEM_BYTES:
        raise ShardError(f"`{spec.name}`: unknown dtype `{spec.dtype}`; known: {', '.join(ITEM_BYTES)}.")
    spec.check()


def _spec(data: object, where: str) -> ShardSpec:
    fields = _fields(data, {"name", "global_shape", "dtype", "box"}, where)
    shape = tuple(
        _int(size, f"{where}.global_shape") for size in _list(fields["global_shape"], f"{where}.global_shape")
    )
    spans = [_list(span, f"{where}.box") for span in _list(fields["box"], f"{where}.box")]
    if bad := [span for span in spans if len(span) != 2]:
        raise ShardError(f"{where}.box: every dimension needs [start, stop], got {bad[0]}.")
    box = tuple((_int(start, f"{where}.box"), _int(stop, f"{where}.box")) for start, stop in spans)
    return ShardSpec(_text(fields["name"], f"{where}.name"), shape, _text(fields["dtype"], f"{where}.dtype"), box)


def _fields(data: object, wanted: set[str], where: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise ShardError(f"{where} must be an object with {sorted(wanted)}, got {type(data).__name__}.")
    fields = cast("dict[str, object]", data)
    if set(fields) != wanted:
        raise ShardError(
            f"{where}: missing {sorted(wanted - set(fields))}, unknown {sorted(set(fields) - wanted)}; "
            f"the keys are {sorted(wanted)}."
        )
    return fields


def _list(data: object, where: str) -> list[object]:
    if not isinstance(data, list):
        raise ShardError(f"{where} must be a list, got {type(data).__name__}.")
    return cast("list[object]", data)


def _int(data: object, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or data < 0:
        raise ShardError(f"{where} must be a whole number, not negative; got {data!r}.")
    return data


def _text(data: object, where: str) -> str:
    if not isinstance(data, str):
        raise ShardError(f"{where} must be a string, got {data!r}.")
    return data
