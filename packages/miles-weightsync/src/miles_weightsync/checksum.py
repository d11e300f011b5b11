"""The checksums that an engine should report after a push, computed while its buckets pass by.

An engine hashes each of its own parameters (`/weights_checker`): SHA-256 cut to 64 bits on a CPU, a tile hash on a GPU,
over the bytes as they lie there. Fused parameters are the rows of their parts one after the other, so their hash is
fed part by part; nothing is kept but the hash states.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .buckets import Bucket, Slot, torch_dtype
from .engine import EngineFacts
from .engine_layouts import ARCHITECTURES, Division, Placement, local_block, local_shape, locate
from .staging import view
from .tile_hash import TileHash

_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """All that the expected checksums depend on; engines that share it share the work."""

    is_known: bool
    """The architecture's layout is known. If not, only parameters with their checkpoint name can be checked."""
    division: Division
    dp: int
    dtype: str | None

    @classmethod
    def of(cls, facts: EngineFacts) -> EngineLayout:
        division = Division(tp=facts.tp, num_kv_heads=facts.num_kv_heads, on_gpu=facts.device != "cpu")
        is_known = facts.is_plain and division.is_plain and facts.architecture in ARCHITECTURES
        return cls(is_known=is_known, division=division, dp=facts.dp, dtype=facts.dtype)


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

    def __init__(self, layout: EngineLayout, buckets: Sequence[Bucket]) -> None:
        self._layout = layout
        self._open_P: dict[tuple[int, str], _Hash] = {}
        self._done_R: list[dict[str, str]] = [{} for _ in range(layout.division.tp)]
        self._parts: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            if (place := self._locate(slot)) is not None:
                self._parts[place.param] = self._parts.get(place.param, 0) + 1
                self._bytes[place.param] = self._bytes.get(place.param, 0) + self._local_bytes(slot, place)

    def add(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Take a bucket as it is staged; buckets come in order."""
        for slot in bucket.slots:
            if (place := self._locate(slot)) is None:
                continue
            whole = view(slot, data)
            if self._layout.dtype is not None and whole.is_floating_point():
                whole = whole.to(torch_dtype(self._layout.dtype))
            for rank in range(self._layout.division.tp):
                self._feed(rank, place, local_block(whole, place, self._layout.division, rank=rank))

    def compare(self, reported_R: Sequence[Mapping[str, str]], *, trusted: frozenset[str] = frozenset()) -> Comparison:
        """Name what differs, what the engine has and did not get, and what it got and does not have.

        Args:
            reported_R: for each rank R of the engine, parameter name to checksum.
            trusted: with an unknown layout, names that an earlier push found equal: those must stay equal, while a
                difference in another one may be the layout's (padding, another element type).
        """
        expected_R = self._done_R * self._layout.dp
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
            missing = reported.keys() - expected.keys()
            num_equal += len(shared) - len(different)
            unequal |= different | missing
            if self._layout.is_known:
                unused = expected.keys() - reported.keys() - _explained_by_tying(expected, reported)
                problems += _problem(f"{len(missing)} parameters of the engine were not pushed{where}", missing)
                problems += _problem(f"{len(unused)} pushed parameters do not exist in the engine{where}", unused)
            else:
                num_unknown += len(missing) + len(different - trusted)
                different &= trusted
            problems += _problem(f"{len(different)} of {len(shared)} parameters differ{where}", different)
        equal = frozenset(name for expected in self._done_R for name in expected) - unequal
        return Comparison(problems=tuple(problems), num_equal=num_equal, equal=equal, num_unknown=num_unknown)

    def _locate(self, slot: Slot) -> Placement | None:
        if self._layout.is_known:
            return locate(slot.name)
        return Placement(slot.name, 0, 1, "none") if self._layout.division.tp == 1 else None

    def _local_bytes(self, slot: Slot, place: Placement) -> int:
        """Bytes of one rank's block."""
        dtype = torch_dtype(slot.dtype)
        if self._layout.dtype is not None and dtype.is_floating_point:
            dtype = torch_dtype(self._layout.dtype)
        return math.prod(local_shape(slot.shape, place, self._layout.division)) * dtype.itemsize

    def _feed(self, rank: int, place: Placement, block: torch.Tensor) -> None:
        key = (rank, place.param)
        state = self._open_P.get(key)
        if state is None:
            state = self._open_P[key] = _Hash(on_gpu=self._layout.division.on_gpu, total_bytes=self._bytes[place.param])
        state.update(block.contiguous().reshape(-1).view(torch.uint8))
        if state.num_parts == self._parts[place.param]:
            self._done_R[rank][place.param] = state.hexdigest()
            del self._open_P[key]


class _Hash:
    """SHA-256 or tile hash behind one face."""

    def __init__(self, *, on_gpu: bool, total_bytes: int) -> None:
        self._tiles = TileHash(total_bytes) if on_gpu else None
        self._sha = hashlib.sha256()
        self.num_parts = 0

    def update(self, data: torch.Tensor) -> None:
        self.num_parts += 1
        if self._tiles is not None:
            self._tiles.update(data)
        else:
            self._sha.update(data.cpu().numpy().data)

    def hexdigest(self) -> str:
        return self._tiles.hexdigest() if self._tiles is not None else self._sha.hexdigest()[:16]


def _explained_by_tying(expected: Mapping[str, str], reported: Mapping[str, str]) -> set[str]:
    """An engine that ties its output layer has no `lm_head`; one that was pushed must equal the embedding."""
    head, embedding = expected.get("lm_head.weight"), expected.get("model.embed_tokens.weight")
    is_tied = "lm_head.weight" not in reported and head is not None and head == embedding
    return {"lm_head.weight"} if is_tied else set()


def _problem(what: str, unordered: Iterable[str]) -> list[str]:
    """One line that names the first few parameters; nothing when there are none."""
    names = sorted(unordered)
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
