"""The turns of a session as an append-only tree. A node holds what its turn added and nothing else.

root ── turn ── turn          branch 0
    └── fork ── turn          branch 1: another reply, or other messages, behind the same turn
fork                          branch 2: a history that shares no turn with what was recorded
subagent ── turn              branch 3
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from miles_tito.records import FinishReason, Message, VersionSpan
from miles_tito.tokens.messages import message_key, reasoning_agrees


class NodeKind(StrEnum):
    """Why a turn stands where it does in the tree; see `classify`."""

    ROOT = "root"
    TURN = "turn"
    RETRY = "retry"
    FORK = "fork"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    TITLE = "title"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a new turn is, and which earlier turn explains it; `Session.begin` records it."""

    kind: NodeKind
    origin: int | None = None
    """The turn that called the sub-agent, wrote the summary, or is summarised."""
    repeats: int | None = None
    """The finished, unused turn of the same request."""


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One turn: the ids put in front of it, and, once committed, the ids sampled."""

    id: int
    rid: str
    """Names the turn's call at the engine."""
    parent: Node | None
    branch: int
    """The first turn behind a node goes on with its branch; every other one opens a new one."""
    kind: NodeKind
    """What it was when it began; `label` says what it turned out to be."""
    origin: int | None
    """The turn that called this sub-agent, wrote the summary that this root begins with, or is summarised."""
    repeats: int | None
    """A turn of the same request that was finished and unused when this one began."""
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
    images: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Images in `prompt_ids`: url, digest, start, num_tokens."""
    routed: bytes = b""
    """Experts of the tokens from the parent's last one on, see `engine.expert_routing`; empty where unreported."""
    finish_reason: FinishReason | None = None
    """None while the turn runs."""
    stop_string: str | None = None
    """What the reply was cut at."""
    form: str = ""
    """Key of the form that the request forced; such a turn is not trained."""
    message: Message = field(default_factory=Message)
    """The reply as the client got it."""
    replay: Message = field(default_factory=Message)
    """The reply as a client's repetition of it is read."""
    is_delivered: bool = False
    """Whether the client got the whole reply."""
    num_ids: int = 0
    """Ids up to the end of this turn."""
    is_carried: bool = False
    """Whether a recorded turn has this one as its origin."""
    superseded_by: int | None = None
    """The recorded turn that repeats this one."""
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

    @property
    def is_used(self) -> bool:
        """Whether the client went on from this turn."""
        return self.is_carried or any(child.is_done for child in self.children)

    @property
    def label(self) -> NodeKind:
        """What the turn turned out to be: a retry, where its request was sent again and its reply was not continued."""
        return NodeKind.RETRY if self.superseded_by is not None and not self.is_used else self.kind


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a request's history the session has recorded."""

    node: Node | None
    """The deepest turn whose whole history the request repeats, None where there is none."""
    num_messages: int
    """How many messages of the request that turn covers."""
    path: bytes
    """Digest of all messages of the request; equal for requests with the same messages, tools and variables."""


class Tree:
    """The turns of one session, found by the messages that lead to them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """In order of creation; given-up turns leave."""
        self.roots: list[Node] = []
        self._by_id: dict[int, Node] = {}
        self._seeds: dict[bytes, None] = {}
        """Of all requests, in order."""
        self._by_path: dict[bytes, list[Node]] = {}
        self._next_id = 0
        self._next_branch = 0

    def get(self, node_id: int) -> Node:
        """The turn of that id, which is recorded or runs."""
        return self._by_id[node_id]

    def match(self, messages: Sequence[Message], seed: bytes) -> Match:
        """The deepest recorded turn that `messages` continue; `seed` digests what else must be equal, such as tools."""
        self._seeds[seed] = None
        return self._match(messages, seed)

    def match_any(self, messages: Sequence[Message]) -> Node | None:
        """The deepest recorded turn that `messages` continue, whatever its tools were."""
        found = [node for seed in self._seeds if (node := self._match(messages, seed).node)]
        return max(found, key=lambda node: node.num_messages, default=None)

    def _match(self, messages: Sequence[Message], seed: bytes) -> Match:
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

    def add(self, match: Match, num_messages: int, prompt_ids: np.ndarray, *, rid: str, place: Place) -> Node:
        """A running turn behind `match`."""
        parent = match.node
        if parent and place.kind is NodeKind.TURN and all(child.branch != parent.branch for child in parent.children):
            branch = parent.branch
        else:
            branch = self._next_branch
            self._next_branch += 1
        node = Node(
            id=self._next_id,
            rid=rid,
            parent=parent,
            branch=branch,
            kind=place.kind,
            origin=place.origin,
            repeats=place.repeats,
            path=match.path,
            asked=match.path,
            num_messages=num_messages,
            prompt_ids=prompt_ids,
            num_ids=(parent.num_ids if parent else 0) + len(prompt_ids),
        )
        self._next_id += 1
        self.nodes.append(node)
        self._by_id[node.id] = node
        (parent.children if parent else self.roots).append(node)
        return node

    def restore(self, nodes: Sequence[Node], *, next_id: int, next_branch: int) -> None:
        """Take over recorded turns, by id, into an empty tree."""
        assert not self.nodes, f"this tree has {len(self.nodes)} turns already"
        for node in nodes:
            self.nodes.append(node)
            self._by_id[node.id] = node
            self._by_path.setdefault(node.path, []).append(node)
            (node.parent.children if node.parent else self.roots).append(node)
            self._relate(node)
        self._next_id, self._next_branch = next_id, next_branch

    def undelivered(self, match: Match) -> Node | None:
        """The recorded reply to the same request that no client got, if there is one."""
        siblings = match.node.children if match.node else self.roots
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
        self._relate(node)

    def discard(self, node: Node) -> None:
        """Forget a turn that was given up."""
        assert not node.is_done, f"turn {node.id} is recorded and stays"
        self.nodes.remove(node)
        del self._by_id[node.id]
        (node.parent.children if node.parent else self.roots).remove(node)

    def _relate(self, node: Node) -> None:
        """Mark the turns that `node` repeats, or that it was called from."""
        if node.origin is not None:
            self._by_id[node.origin].is_carried = True
        if node.repeats is not None:
            self._by_id[node.repeats].superseded_by = node.id


def _extend(path: bytes, key: bytes) -> bytes:
    return hashlib.sha256(path + key).digest()[:16]  # processors compute it; histories are long


def _reasoning_fits(node: Node, messages: Sequence[Message]) -> bool:
    return all(reasoning_agrees(messages[n.num_messages - 1], n.replay) for n in node.lineage)


def _same_calls(node: Node, messages: Sequence[Message]) -> bool:
    def ids(message: Message) -> list[str | None]:
        return [call.get("id") for call in message.get("tool_calls", [])]

    return bool(ids(node.replay)) and ids(messages[node.num_messages - 1]) == ids(node.replay)
