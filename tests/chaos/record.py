"""What the scripts saw, written down outside the run: it survives every kill and knows no fate, no ledger.

`weights`: a tree. Every optimizer step makes a node, whatever branch of the run it is on, and no number is ever used
twice. The engines sample the number of the node that they hold, so each token says which weights it came from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_write = os.write
"""The system's own: faults that are injected into disks are not meant for this file."""


class Weights(NamedTuple):
    """One node of the tree of weights."""

    node: int
    parent: int
    """-1 for the weights that training starts from."""
    version: int


class Record:
    """An append-only file of JSON lines; one process at a time appends, the kernel keeps what a killed one wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_weights = sum(1 for _ in self.entries("weights"))

    def add(self, kind: str, /, **fields: Any) -> None:
        _write(self._fd, json.dumps([kind, fields]).encode() + b"\n")

    def entries(self, *kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Everything of these kinds, in order."""
        with self._path.open("rb") as file:
            for line in file:
                kind, fields = json.loads(line)
                if kind in kinds:
                    yield kind, fields

    def new_weights(self, *, parent: int, version: int) -> int:
        """Note the weights that an optimizer step has made; returns their node."""
        node = self._num_weights
        self._num_weights += 1
        self.add("weights", node=node, parent=parent, version=version)
        return node

    def last_start(self) -> int:
        """Number of the newest start of the run."""
        return max(fields["start"] for _, fields in self.entries("start"))

    def weights(self) -> WeightTree:
        return WeightTree([Weights(**fields) for _, fields in self.entries("weights")])

    def close(self) -> None:
        os.close(self._fd)


class WeightTree:
    """How far apart any two weights are, whatever their versions are called."""

    def __init__(self, nodes: list[Weights]) -> None:
        self._nodes = nodes

    def version(self, node: int) -> int:
        return self._nodes[node].version

    def parent(self, node: int) -> int:
        return self._nodes[node].parent

    def distance(self, one: int, other: int) -> int:
        """Optimizer steps on the way from one to the other through the tree."""
        above = {node: steps for steps, node in enumerate(self._way_up(one))}
        for steps, node in enumerate(self._way_up(other)):
            if node in above:
                return steps + above[node]
        raise ValueError(f"Weights {one} and {other} do not come from one start.")

    def _way_up(self, node: int) -> Iterator[int]:
        while node >= 0:
            yield node
            node = self._nodes[node].parent
