"""Which turns of a session become training data.

A picker gets all recorded turns and returns those whose paths from their root are handed out, one trajectory each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from miles_tito.errors import RequestError

from .tree import Node, NodeKind

Picker = Callable[[Sequence[Node]], Iterable[Node]]


def pick_default(nodes: Sequence[Node]) -> list[Node]:
    """The ends of what is left without retries and title calls: forks, sub-agents and both sides of a compaction."""
    kept = [node for node in nodes if node.label not in (NodeKind.RETRY, NodeKind.TITLE)]
    return _ends(kept)


def pick_leaves(nodes: Sequence[Node]) -> list[Node]:
    """Every end, retries and title calls among them."""
    return _ends(nodes)


def pick_all(nodes: Sequence[Node]) -> list[Node]:
    """Every turn, as a trajectory of its own."""
    return list(nodes)


PICKERS: dict[str, Picker] = {"default": pick_default, "leaves": pick_leaves, "all": pick_all}


def picker_named(name: str) -> Picker:
    """
    Raises:
        RequestError: there is none of that name.
    """
    if name not in PICKERS:
        known = ", ".join(PICKERS)
        raise RequestError(f"Unknown picker {name!r}; known: {known}.", code="invalid_value", param="picker")
    return PICKERS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A recorded turn that no trajectory trains."""

    node: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Paths of the tree that become trajectories, chosen at one moment, so that a thread can build them later."""

    paths: tuple[tuple[Node, ...], ...]
    labels: tuple[NodeKind, ...]
    """Of each path."""
    ids: tuple[str, ...]
    """Of each path, within the session."""
    dropped: tuple[Dropped, ...]


def pick(nodes: Sequence[Node], picker: Picker, *, max_tokens: int | None = None) -> Picked:
    """Apply `picker` to the turns of a session; paths longer than `max_tokens` are dropped."""
    recorded = [node for node in nodes if node.is_done]
    chosen = sorted(picker(recorded), key=lambda node: (node.branch, node.id))
    why = {node.id: f"The turn still runs: {node.rid}." for node in nodes if not node.is_done}
    fitting: list[Node] = []
    for node in chosen:
        if max_tokens is not None and node.num_ids > max_tokens:
            for turn in node.lineage:
                why[turn.id] = f"Its trajectory has {node.num_ids} tokens, more than `max_tokens` of {max_tokens}."
        else:
            fitting.append(node)
    paths = tuple(tuple(node.lineage) for node in fitting)
    trained = {node.id for path in paths for node in path}
    ends = {node.branch: node for node in _ends(fitting)}
    return Picked(
        paths=paths,
        labels=tuple(_label(path) for path in paths),
        ids=tuple(
            str(node.branch) if ends.get(node.branch) is node else f"{node.branch}.{node.id}" for node in fitting
        ),
        dropped=tuple(
            Dropped(node=node.id, why=why.get(node.id) or _reason(node))
            for node in nodes
            if node.id not in trained or node.form
        ),
    )


def _ends(nodes: Sequence[Node]) -> list[Node]:
    parents = {node.parent.id for node in nodes if node.parent}
    return [node for node in nodes if node.id not in parents]


def _label(path: Sequence[Node]) -> NodeKind:
    """What a whole path is: the last of its turns that is not simply the next one."""
    return next((label for node in reversed(path) if (label := node.label) is not NodeKind.TURN), NodeKind.ROOT)


def _reason(node: Node) -> str:
    if node.form:
        return "forced: the request forced the form of this reply, so it stands in trajectories and is not trained."
    if node.label is NodeKind.RETRY:
        return f"retry: the client sent the same request again, and turn {node.superseded_by} took its place."
    return f"{node.label}: the picker left it out."
