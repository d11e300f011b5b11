"""From a plan to work: which pieces each trainer rank packs into which bucket of which engine rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import ShardError
from ..layout import Box, ShardSpec, volume
from ..planner import Copy, Layout, ModelShape, Part, SGLang, TensorLayout, make_plan
from ..planner.layout import ITEM_BYTES
from ..planner.sglang import NOT_FROM_CHECKPOINTS
from ..receiver.table import Bucket, Piece, Table

_ALIGN = 64
_CONVERTIBLE = {"float64", "float32", "bfloat16", "float16"}
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class EngineShape:
    """All of an engine that its plan depends on; engines started alike share it."""

    info: Mapping[str, object]
    """What of `/server_info` says how the model is divided."""
    config: Mapping[str, object]
    """The model's config."""
    params_R: tuple[Mapping[str, tuple[tuple[int, ...], str]], ...]
    """For each rank R of the engine, shape and dtype of every live parameter."""

    @property
    def key(self) -> str:
        """Equal for equal shapes."""
        said = json.dumps(
            [self.info, self.config, [sorted(params.items()) for params in self.params_R]], sort_keys=True
        )
        return hashlib.sha256(said.encode()).hexdigest()[:16]


class Item(NamedTuple):
    """One piece as its sender sees it."""

    name: str
    block: Box
    """The sender's block of the tensor."""
    box: Box
    """The piece, in coordinates of the whole tensor."""
    dtype: str
    """Element type to send."""
    start: int
    """First byte in the bucket."""


class Load(NamedTuple):
    """One bucket as its sender sees it."""

    dst: int
    bucket: int
    """Position in the table of the engine rank."""
    start: int
    nbytes: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything that moves to engines of one shape."""

    key: str
    """Of the engine's shape."""
    id: str
    """Of the plan: the same shape filled by another trainer layout is another plan."""
    tables_R: tuple[Table, ...]
    """For each rank R of the engine."""
    loads: Mapping[int, tuple[Load, ...]]
    """For each trainer rank, what it sends."""
    names_R: tuple[tuple[str, ...], ...]
    """For each rank R, the checkpoint tensor of every piece in the order of its table."""
    unused: tuple[str, ...]
    """Tensors that the trainer holds and the engine does not load."""

    @property
    def nbytes(self) -> int:
        """Bytes of a full push to one engine."""
        return sum(piece.nbytes for table in self.tables_R for bucket in table.buckets for piece in bucket.pieces)


def plan_engine(
    shape: EngineShape, hosts: Mapping[int, str], specs_R: Sequence[Sequence[ShardSpec]], *, bucket_bytes: int
) -> EnginePlan:
    """Plan every byte from trainer ranks to the ranks of an engine.

    Raises:
        ShardError: the shards do not fill what the engine has, or its layout is not known.
    """
    model = ModelShape.from_hf(shape.config)
    engine = SGLang.from_server_info(shape.info, model=model, fuse_shared_experts=_is_fused(model, shape))
    parts_R = [engine.parts(rank) for rank in range(engine.tp)]
    dtypes = _check_parts(shape, parts_R)
    target = engine.layout()
    target = Layout(
        target.hosts, {name: _typed(t, dtypes[name]) for name, t in target.tensors.items() if name in dtypes}
    )
    source = Layout.from_shards(hosts, [(rank, spec) for rank, specs in enumerate(specs_R) for spec in specs])
    unused = tuple(
        sorted(source.tensors.keys() - target.tensors.keys() - ({"lm_head.weight"} if model.tied else set()))
    )
    source = Layout(source.hosts, {n: _as_sent(n, t, target) for n, t in source.tensors.items() if n in target.tensors})
    plan = make_plan(source, target)
    places = [{(part.name, part.box): part for part in parts} for parts in parts_R]
    builder = _Builder(places, dtypes, bucket_bytes=bucket_bytes)
    for copy in plan.copies:
        for box in _split(copy.box, ITEM_BYTES[dtypes[copy.name]], bucket_bytes):
            builder.add(copy, box)
    return builder.build(shape.key, engine.tp, unused)


class _Builder:
    """Fills buckets in the order of the plan, one open bucket for each pair of ranks."""

    def __init__(
        self, places_R: list[dict[tuple[str, Box], Part]], dtypes: Mapping[str, str], *, bucket_bytes: int
    ) -> None:
        self._places_R, self._dtypes, self._bucket_bytes = places_R, dtypes, bucket_bytes
        self._done: dict[tuple[int, int], list[list[tuple[Item, Piece]]]] = {}
        self._fill: dict[tuple[int, int], int] = {}

    def add(self, copy: Copy, box: Box) -> None:
        part = self._places_R[copy.dst][copy.name, copy.dst_block]
        dtype = self._dtypes[copy.name]
        item_bytes = ITEM_BYTES[dtype]
        nbytes, pair = volume(box) * item_bytes, (copy.src, copy.dst)
        buckets = self._done.setdefault(pair, [[]])
        start = -(-self._fill.get(pair, 0) // _ALIGN) * _ALIGN
        if buckets[-1] and start + nbytes > self._bucket_bytes:
            buckets.append([])
            start = 0
        self._fill[pair] = start + nbytes
        live = tuple((span.start, span.stop) for span in part.slices(box))
        piece = Piece(_live_name(part), live, start, item_bytes)
        buckets[-1].append((Item(copy.name, copy.src_block, box, dtype, start), piece))

    def build(self, key: str, tp: int, unused: tuple[str, ...]) -> EnginePlan:
        loads: dict[int, list[Load]] = {}
        buckets_R: list[tuple[Bucket, ...]] = []
        names: list[tuple[str, ...]] = []
        for dst in range(tp):
            buckets: list[Bucket] = []
            start = 0
            for (src, to), filled in sorted(self._done.items()):
                for entries in filled if to == dst else ():
                    last = entries[-1][1]
                    nbytes = last.start + last.nbytes
                    loads.setdefault(src, []).append(
                        Load(dst, len(buckets), start, nbytes, tuple(i for i, _ in entries))
                    )
                    buckets.append(Bucket(src, start, nbytes, tuple(piece for _, piece in entries)))
                    start = -(-(start + nbytes) // _ALIGN) * _ALIGN
            buckets_R.append(tuple(buckets))
            names.append(
                tuple(i.name for (_, to), f in sorted(self._done.items()) if to == dst for e in f for i, _ in e)
            )
        said = hashlib.sha256(f"{key} {buckets_R}".encode()).hexdigest()[:16]
        tables_R = tuple(Table(said, buckets) for buckets in buckets_R)
        return EnginePlan(key, said, tables_R, {src: tuple(of) for src, of in loads.items()}, tuple(names), unused)


def _check_parts(shape: EngineShape, parts_R: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Element type of each tensor in the engine; the planner's idea of every parameter must be what lives there."""
    dtypes: dict[str, str] = {}
    problems: list[str] = []
    if len(parts_R) != len(shape.params_R):
        raise ShardError(f"The plan is for {len(parts_R)} engine ranks; {len(shape.params_R)} have a receiver.")
    filled = {_live_name(part) for parts in parts_R for part in parts}  # on some ranks one may be all padding
    for rank, (parts, params) in enumerate(zip(parts_R, shape.params_R, strict=True)):
        left = [name for name in params if name not in filled and not name.endswith(NOT_FROM_CHECKPOINTS)]
        problems += [f"`{name}` on rank {rank} is filled by no tensor" for name in left]
        for part in parts:
            name = _live_name(part)
            if name not in params:
                problems.append(f"`{name}` for {part.name} does not exist on rank {rank}")
            elif params[name][0] != part.shape:
                problems.append(f"`{name}` on rank {rank} is {params[name][0]}, the plan has {part.shape}")
            elif params[name][1] != dtypes.setdefault(part.name, params[name][1]):
                problems.append(f"`{part.name}` has different element types on different ranks")
    if problems:
        unique = list(dict.fromkeys(problems))
        more = f" and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
        raise ShardError(
            "The engine's parameters are not laid out as the planner knows them: "
            f"{'; '.join(unique[:_SHOWN])}{more}. Use `way = tensor` or `disk` for it."
        )
    return dtypes


def _as_sent(name: str, held: TensorLayout, target: Layout) -> TensorLayout:
    """The trainer's tensor in the engine's element type, which its senders convert to."""
    dtype = target.tensors[name].dtype
    if held.dtype != dtype and not {held.dtype, dtype} <= _CONVERTIBLE:
        raise ShardError(
            f"`{name}` is {held.dtype} in the trainer and {dtype} in the engine; hand over what it serves."
        )
    return _typed(held, dtype)


def _typed(tensor: TensorLayout, dtype: str) -> TensorLayout:
    if dtype not in ITEM_BYTES:
        raise ShardError(f"The engine holds {dtype}, which the planner does not know.")
    return replace(tensor, dtype=dtype)


def _is_fused(model: ModelShape, shape: EngineShape) -> bool:
    """Whether SGLang put the shared expert into one more slot of the stacked experts, which `/server_info` hides."""
    ep = shape.info.get("ep_size")
    local = model.num_experts // (ep if isinstance(ep, int) else 1)
    stacked = [shape for name, (shape, _) in shape.params_R[0].items() if name.endswith(".w13_weight")]
    return bool(stacked) and model.n_shared_experts == 1 and stacked[0][0] == local + 1


def _split(box: Box, item_bytes: int, limit: int) -> Iterator[Box]:
    """Rows of a box, as many at a time as fit into a bucket; one row at least."""
    if not box or volume(box) * item_bytes <= limit:
        yield box
        return
    (first, last), rest = box[0], box[1:]
    step = max(1, limit // (volume(rest) * item_bytes))
    for start in range(first, last, step):
        yield ((start, min(start + step, last)), *rest)


def _live_name(part: Part) -> str:
    return part.param if part.model == "target" else f"draft:{part.param}"
