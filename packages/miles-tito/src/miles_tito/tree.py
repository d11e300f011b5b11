"""The turns of a session as an append-only tree. A node holds what its turn added and nothing else.

root ── turn ── turn          branch 0, main
    └── turn (fork)           branch 1: another reply, or other messages, behind the same turn
root (fork)                   branch 2: a history that shares no turn with what was recorded
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .messages import message_key, reasoning_agrees
from .records import FinishReason, Message, TrajectoryKind, VersionSpan


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One turn: the ids put in front of it, and, once committed, the ids sampled."""

    id: int
    rid: str
    """Names the turn's call at the engine."""
    parent: Node | None
    branch: int
    """The first turn behind a node goes on with its branch; every other one opens a new one."""
    kind: TrajectoryKind
    path: bytes
    """Digest of all messages up to this turn, its reply excluded until it is committed."""
    asked: bytes
    """Digest of the request: all messages up to this turn and what else stands in its prompt."""
    num_messages: int
    prompt_ids: np.ndarray
    """[P] int32, behind the parent's ids: the close token if it was missing, new messages, the turn's opening."""
    completion_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[C] int32."""
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """[C] float32."""
    versions: tuple[VersionSpan, ...] = ()
    """Spans over `completion_ids`."""
    finish_reason: FinishReason | None = None
    """None while the turn runs."""
    message: Message = field(default_factory=Message)
    """The reply as the client got it."""
    replay: Message = field(default_factory=Message)
    """The reply as a client's repetition of it is read."""
    is_delivered: bool = False
    """Whether the client got the whole reply."""
    num_ids: int = 0
    """Ids up to the end of this turn."""
    children: list[Node] = field(default_factory=list["Node"])

    @property
    def lineage(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request's history leaves what was recorded."""

    node: Node | None
    """The deepest turn whose whole history the request repeats, None where there is none."""
    num_messages: int
    """How many messages of the request that turn covers."""
    path: bytes
    """Digest of all messages of the request."""


class Tree:
    """Turns by content."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """In order of creation; given-up turns leave."""
        self._by_path: dict[bytes, list[Node]] = {}
        self._next_id = 0
        self._next_branch = 0

    def match(self, messages: Sequence[Message], seed: bytes) -> Match:
        """The deepest recorded turn that `messages` continue; `seed` digests what else must be equal, such as tools."""
        paths = [seed]
        for message in messages:
            paths.append(_extend(paths[-1], message_key(message)))
        for count in range(len(messages), 0, -1):
            fitting = [n for n in self._by_path.get(paths[count], []) if _reasoning_fits(n, messages)]
            if fitting:
                # Twins: the one whose call ids are replayed, else one that nobody went on from, else the newest.
                best = max(fitting, key=lambda n: (_same_calls(n, messages), not n.children, n.id))
                return Match(best, count, paths[-1])
        return Match(None, 0, paths[-1])

    def add(self, match: Match, num_messages: int, prompt_ids: np.ndarray, *, rid: str) -> Node:
        """A running turn behind `match`."""
        parent = match.node
        goes_on = not parent.children if parent else not self.nodes
        if goes_on and parent:
            branch, kind = parent.branch, parent.kind
        else:
            branch, kind = self._next_branch, TrajectoryKind.MAIN if goes_on else TrajectoryKind.FORK
            self._next_branch += 1
        node = Node(
            id=self._next_id,
            rid=rid,
            parent=parent,
            branch=branch,
            kind=kind,
            path=match.path,
            asked=match.path,
            num_messages=num_messages,
            prompt_ids=prompt_ids,
            num_ids=(parent.num_ids if parent else 0) + len(prompt_ids),
        )
        self._next_id += 1
        self.nodes.append(node)
        if parent:
            parent.children.append(node)
        return node

    def restore(self, nodes: Sequence[Node], *, next_id: int, next_branch: int) -> None:
        """Take over recorded turns, by id, into an empty tree."""
        assert not self.nodes, f"this tree has {len(self.nodes)} turns already"
        for node in nodes:
            self.nodes.append(node)
            self._by_path.setdefault(node.path, []).append(node)
            if node.parent:
                node.parent.children.append(node)
        self._next_id, self._next_branch = next_id, next_branch

    def undelivered(self, match: Match) -> Node | None:
        """The recorded reply to the same request that no client got, if there is one."""
        siblings = match.node.children if match.node else [node for node in self.nodes if node.parent is None]
        lost = (n for n in siblings if n.is_done and n.asked == match.path and not (n.is_delivered or n.children))
        return next(lost, None)

    def commit(self, node: Node, replay: Message) -> None:
        """Make a turn, whose result is filled in, one that others can continue."""
        assert node.is_done, f"turn {node.id} is committed without a finish reason"
        node.replay = replay
        node.path = _extend(node.path, message_key(replay))
        node.num_messages += 1
        node.num_ids += len(node.completion_ids)
        self._by_path.setdefault(node.path, []).append(node)

    def discard(self, node: Node) -> None:
        """Forget a turn that was given up."""
        assert not node.is_done, f"turn {node.id} is recorded and stays"
        self.nodes.remove(node)
        if node.parent:
            node.parent.children.remove(node)

    def leaves(self) -> list[Node]:
        """Recorded turns that no recorded turn continues, by branch."""
        ends = [n for n in self.nodes if n.is_done and not any(child.is_done for child in n.children)]
        return sorted(ends, key=lambda n: (n.branch, n.id))


def _extend(path: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(path + key, digest_size=16).digest()


def _reasoning_fits(node: Node, messages: Sequence[Message]) -> bool:
    return all(reasoning_agrees(messages[n.num_messages - 1], n.replay) for n in node.lineage)


def _same_calls(node: Node, messages: Sequence[Message]) -> bool:
    def ids(message: Message) -> list[str | None]:
        return [call.get("id") for call in message.get("tool_calls", [])]

    return bool(ids(node.replay)) and ids(messages[node.num_messages - 1]) == ids(node.replay)
