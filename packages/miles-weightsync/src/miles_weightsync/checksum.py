"""The checksums that an engine should report after a push, computed while its buckets pass by.

An engine hashes each of its own parameters (`/weights_checker`): SHA-256 cut to 64 bits on a CPU, a tile hash on a GPU,
over the bytes as they lie there. The planner says which parts of which tensors lie where in a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .buckets import Bucket, torch_dtype
from .engine import EngineFacts
from .parameter_hash import ParameterHash
from .planner import Part, SGLang
from .planner.sglang import NOT_FROM_CHECKPOINTS
from .staging import view

_SHOWN = 6
HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """All that the expected checksums depend on; engines that share it share the work."""

    model: SGLang | None
    """None where it is not known how parameters lie: only those with their checkpoint name can be checked."""
    tp: int
    replicas: int
    """Data-parallel copies of the whole model."""
    on_gpu: bool
    dtype: str | None

    @classmethod
    def of(cls, facts: EngineFacts) -> EngineLayout:
        spreads_attention = facts.layout is not None and facts.layout.dp > 1
        return cls(
            model=facts.layout,
            tp=facts.tp,
            replicas=1 if spreads_attention else facts.dp,
            on_gpu=facts.device != "cpu",
            dtype=facts.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the checksums of one engine say."""

    problems: tuple[str, ...]
    """Empty when nothing contradicts the trainer."""
    num_equal: int
    """Checksums that were compared and equal, over all ranks of the engine."""
    equal: frozenset[str]
    """Names of the parameters that are equal on every rank."""
    num_unknown: int
    """Checksums that prove nothing, because the layout of the parameter is not known here."""


class ExpectedChecksums:
    """Hash the buckets of one push as an engine of this layout will hold them."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._kept = layout.model.model.always_float32() if layout.model is not None else frozenset[str]()
        self._places_R = (
            [places_of(layout.model, rank) for rank in range(layout.tp)] if layout.model is not None else []
        )
        self._open_P: dict[tuple[int, str], ParameterHash] = {}
        self._done_R: list[dict[str, str]] = [{} for _ in range(layout.tp)]
        self._unused: set[str] = set()
        for places, done in zip(self._places_R, self._done_R, strict=False):
            done |= {name: self._hash_of_padding(shape) for name, shape in places.padding.items()}

    def add(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Take a bucket as it is staged."""
        for slot in bucket.slots:
            whole = view(slot, data)
            name = full_name(slot.name)
            if self._layout.dtype is not None and whole.is_floating_point():
                whole = whole.to(torch.float32 if name in self._kept else torch_dtype(self._layout.dtype))
            if self._layout.model is not None:
                self._add_known(name, whole)
            elif self._layout.tp == 1:
                box = tuple((0, size) for size in whole.shape)
                part = Part(slot.name, box, slot.name, tuple(whole.shape), (0,) * whole.dim())
                self._feed(0, part, [part], whole)

    def _add_known(self, name: str, whole: torch.Tensor) -> None:
        if not self._places_R[0].knows(name):
            self._unused.add(name)
        for rank, places in enumerate(self._places_R):
            for part in places.parts.get(name, ()):
                block = whole[tuple(slice(start, stop) for start, stop in part.box)]
                self._feed(rank, part, places.of_param[part.param], block)

    def compare(self, reported_R: Sequence[Mapping[str, str]], *, trusted: frozenset[str] = frozenset()) -> Comparison:
        """Name what differs, what the engine has and did not get, and what it got and does not have.

        Args:
            reported_R: for each rank R of the engine, parameter name to checksum.
            trusted: with an unknown layout, names that an earlier push found equal: those must stay equal, while a
                difference in another one may be the layout's (padding, another element type).
        """
        expected_R = self._done_R * self._layout.replicas
        if len(reported_R) != len(expected_R):
            problem = f"the engine reported {len(reported_R)} ranks, expected {len(expected_R)}"
            return Comparison(problems=(problem,), num_equal=0, equal=frozenset(), num_unknown=0)
        problems: list[str] = []
        num_equal = num_unknown = 0
        unequal: set[str] = set()
        for rank, (expected, reported) in enumerate(zip(expected_R, reported_R, strict=True)):
            where = f" on rank {rank}" if len(expected_R) > 1 else ""
            shared = expected.keys() & reported.keys()
            different = {name for name in shared if expected[name] != reported[name]}
            missing = {n for n in reported.keys() - expected.keys() if not n.endswith(NOT_FROM_CHECKPOINTS)}
            num_equal += len(shared) - len(different)
            unequal |= different | missing
            if self._layout.model is not None:
                unused = (expected.keys() | self._unused) - reported.keys() - _explained_by_tying(expected, reported)
                problems += listed(f"{len(missing)} parameters of the engine were not pushed{where}", missing)
                problems += listed(f"{len(unused)} pushed parameters do not exist in the engine{where}", unused)
            else:
                num_unknown += len(missing) + len(different - trusted)
                different &= trusted
            problems += listed(f"{len(different)} of {len(shared)} parameters differ{where}", different)
        equal = frozenset(name for expected in self._done_R for name in expected) - unequal
        return Comparison(problems=tuple(problems), num_equal=num_equal, equal=equal, num_unknown=num_unknown)

    def _hash_of_padding(self, shape: tuple[int, ...]) -> str:
        dtype = torch_dtype(self._layout.dtype or "bfloat16")
        return ParameterHash(shape, [], on_gpu=self._layout.on_gpu, item_bytes=dtype.itemsize).hexdigest()

    def _feed(self, rank: int, part: Part, parts: Sequence[Part], block: torch.Tensor) -> None:
        key = (rank, part.param)
        state = self._open_P.get(key)
        if state is None:
            state = self._open_P[key] = ParameterHash(
                part.shape, parts, on_gpu=self._layout.on_gpu, item_bytes=block.element_size()
            )
        if state.add(part, block):
            self._done_R[rank][part.param] = state.hexdigest()
            del self._open_P[key]


class _Places:
    """Where the checkpoint's tensors lie in the parameters of one rank."""

    def __init__(self, layout: SGLang, rank: int) -> None:
        model = layout.model
        parts = [part for part in layout.parts(rank) if part.model == "target"]
        if model.tied:  # an engine that ties its head to the embedding has none; one that was pushed must equal it
            parts += [p._replace(name=HEAD, param=HEAD) for p in parts if p.name == _EMBEDDING]
        self.parts: dict[str, list[Part]] = {}
        self.of_param: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.name, []).append(part)
            self.of_param.setdefault(part.param, []).append(part)
        self.padding = {name: shape for name, shape in layout.params(rank).items() if name not in self.of_param}
        """Parameters that hold nothing of any tensor."""
        self._names = {tensor.name for tensor in model.tensors()} | ({HEAD} if model.tied else set[str]())

    def knows(self, name: str) -> bool:
        """Whether the model has such a tensor, here or elsewhere, or the engine ignores it (rotary tables)."""
        return name in self._names or "rotary_emb." in name


@lru_cache(maxsize=64)
def places_of(layout: SGLang, rank: int) -> _Places:
    return _Places(layout, rank)


def full_name(name: str) -> str:
    """Models without a head leave the prefix away."""
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name


def _explained_by_tying(expected: Mapping[str, str], reported: Mapping[str, str]) -> set[str]:
    head = expected.get(HEAD)
    is_tied = HEAD not in reported and head is not None and head == expected.get(_EMBEDDING)
    return {HEAD} if is_tied else set()


def listed(what: str, unordered: Iterable[str]) -> list[str]:
    """One line that names the first few parameters; nothing when there are none."""
    names = sorted(unordered)
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
