"""Classes of elements by the magnitude of their old value: how likely a value moves depends on its exponent.

Both sides know the old values, so the position of a change is its rank among the elements of its class. The floors of
the classes are chosen from a sample and travel in the delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .blob import EXPONENT_SHIFT
from .errors import DeltaError

MAX_CLASSES = 16
_CLASS_BITS = 700.0
"""What another class costs: a table entry, and the Huffman tables of its streams."""
_CHANCE_BITS = 16.0
"""What two classes alike may seem to gain in a sample by chance."""
_SAMPLE_BLOCKS, _SAMPLE_BLOCK = 128, 1024


@dataclass(frozen=True, slots=True)
class ClassPlan:
    """The floors of the classes, ascending from 0, and which of their tracks are to be wide."""

    floors: tuple[int, ...]
    changed_share: tuple[float, ...]
    """Of the elements sampled in each class."""


def sample(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same evenly spread elements of both; everything where there is little."""
    size = old.size
    if size <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK:
        return old, new
    starts = np.linspace(0, size - _SAMPLE_BLOCK, _SAMPLE_BLOCKS).astype(np.int64)
    picked = (starts[:, None] + np.arange(_SAMPLE_BLOCK)).ravel()
    return old[picked], new[picked]


def plan_classes(old: np.ndarray, new: np.ndarray, *, count: int) -> ClassPlan:
    """Classes that make the delta of `count` elements short, going by a sample of both arrays."""
    if old.size == 0:
        return ClassPlan((0,), (0.0,))
    shift = EXPONENT_SHIFT[old.itemsize]
    exponents = magnitude(old) >> shift
    bins = int(exponents.max()) + 1
    changed = old != new
    elements = np.bincount(exponents, minlength=bins).astype(float)
    steps = (new[changed] - old[changed]).view(f"i{old.itemsize}").astype(np.int64)
    moved = np.bincount(exponents[changed].astype(np.int64) * 16 + _kinds(steps), minlength=bins * 16).astype(float)
    moved = moved.reshape(bins, 16)

    groups = [_Group(int(e), float(elements[e]), moved[e]) for e in np.flatnonzero(elements)]
    pairs = [a.joined(b) for a, b in pairwise(groups)]
    scale = count / old.size
    while pairs:
        losses = [pair.bits - a.bits - b.bits for pair, (a, b) in zip(pairs, pairwise(groups), strict=True)]
        i = int(np.argmin(losses))
        if losses[i] * scale > _CLASS_BITS and losses[i] > _CHANCE_BITS and len(groups) <= MAX_CLASSES:
            break
        groups[i : i + 2] = [pairs[i]]
        near = range(max(i - 1, 0), min(i + 1, len(groups) - 1))
        pairs[max(i - 1, 0) : i + 2] = [groups[k].joined(groups[k + 1]) for k in near]
    floors = (0, *(group.first << shift for group in groups[1:]))
    return ClassPlan(floors, tuple(float(group.moved.sum() / group.elements) for group in groups))


class _Group:
    """Neighbouring exponents, from `first` on."""

    def __init__(self, first: int, elements: float, moved: np.ndarray) -> None:
        self.first, self.elements, self.moved = first, elements, moved
        self.bits = _bits(elements, moved)

    def joined(self, other: _Group) -> _Group:
        return _Group(self.first, self.elements + other.elements, self.moved + other.moved)


def expected_bits(old: np.ndarray, new: np.ndarray) -> float:
    """Entropy of the changes between two samples, about; beyond 8, steps of one length count as equally likely."""
    changed = old != new
    steps = (new[changed] - old[changed]).view(f"i{old.itemsize}").astype(np.int64)
    lengths = np.log2(np.maximum(np.abs(steps) / 4, 1.0))
    return _bits(float(old.size), np.bincount(_kinds(steps), minlength=16).astype(float)) + float(lengths.sum())


def magnitude(values: np.ndarray) -> np.ndarray:
    """The bits without the sign."""
    return values & values.dtype.type((1 << (8 * values.itemsize - 1)) - 1)


def class_of(old: np.ndarray, floors: Sequence[int]) -> np.ndarray:
    """[N] uint8, the class of every element."""
    return (np.searchsorted(np.asarray(floors, np.int64), magnitude(old), side="right") - 1).astype(np.uint8)


def locate(old: np.ndarray, floors: Sequence[int], elements: Sequence[int], ranks: Sequence[np.ndarray]) -> np.ndarray:
    """Where the elements with the given ranks in each class lie: for each class in turn, [sum of n] int64.

    Raises:
        DeltaError: the classes have other sizes, so `old` is not what the delta was made against.
    """
    classes, positions = class_of(old, floors), list[np.ndarray]()
    for k, (expected, wanted) in enumerate(zip(elements, ranks, strict=True)):
        members = np.flatnonzero(classes == k)
        if members.size != expected:
            raise wrong_base(f"class {k} of its elements has {members.size} of them instead of {expected}")
        positions.append(members[wanted.astype(np.int64)])
    return np.concatenate(positions)


def wrong_base(how: str) -> DeltaError:
    """What is raised where the old values are not those of the delta."""
    return DeltaError(
        f"The delta was made against other old values: {how}. Put it on exactly the version that it is based on, "
        "once, or send the full weights."
    )


def _kinds(steps: np.ndarray) -> np.ndarray:
    """[n] steps from -8 to 7 as 0 to 15; what lies beyond counts as the end it is past."""
    return np.clip(steps + 8, 0, 15)


def _bits(elements: float, moved: np.ndarray) -> float:
    """Entropy of which elements move and how far."""
    changes = moved.sum()
    still = elements - changes
    return float(_xlogx(elements) - _xlogx(still) - np.sum(_xlogx(moved)))


def _xlogx(x: float | np.ndarray) -> np.ndarray:
    return x * np.log2(np.maximum(x, 1.0))
