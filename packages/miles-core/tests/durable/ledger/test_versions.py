"""Versions across rewinds against what they stand for: the distance between two policies in the tree of all weights."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from miles_core.durable.ledger import effective_version, effective_versions


@dataclass(eq=False)
class Weights:
    """One state of the weights, and the one that a step made it from."""

    label: int
    parent: Weights | None

    def ancestors(self) -> list[Weights]:
        """Itself first."""
        return [self, *(self.parent.ancestors() if self.parent else [])]


def distance(one: Weights, other: Weights) -> int:
    """Steps along the tree from one policy to the other."""
    to_root = one.ancestors()
    common = next(weights for weights in other.ancestors() if weights in to_root)
    return to_root.index(common) + other.ancestors().index(common)


MOVES = st.lists(st.one_of(st.just("step"), st.just("step"), st.integers(0, 12)), max_size=25)
"""Train a step, or go back to one (to the newest where there are not so many)."""


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_the_effective_version_is_the_distance_between_policies(moves: list[str | int]) -> None:
    now = Weights(0, None)
    sampled: list[tuple[Weights, list[int]]] = [(now, [])]
    for move in moves:
        if isinstance(move, int):
            step = min(move, now.label)
            now = next(weights for weights in now.ancestors() if weights.label == step)
            for _, rewinds in sampled:
                rewinds.append(step)
        else:
            now = Weights(now.label + 1, now)
            sampled.append((now, []))
        for weights, rewinds in sampled:
            assert now.label - effective_version(weights.label, rewinds) == distance(weights, now)


@given(st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4))
def test_of_a_range_the_extremes_are_told(one: int, other: int, rewinds: list[int]) -> None:
    oldest, newest = min(one, other), max(one, other)
    every = [effective_version(version, rewinds) for version in range(oldest, newest + 1)]
    assert effective_versions(oldest, newest, rewinds) == (min(every), max(every))
