"""What of a session survives a crash of its server: one append-only file a session.

    file   = frame frame frame …
    frame  = length of the body (4 bytes) │ CRC-32 of the body (4 bytes) │ body (msgpack)
    bodies = Opened, then Begun … Recorded | GivenUp … Delivered …

A frame is one `write`, so it is with the kernel before the client sees the end of its answer: a killed process loses
nothing. It is not synced to the disk, since a machine that loses power loses the engine and the client as well, and a
sync would cost each turn milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import zlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from miles_tito.errors import SessionError
from miles_tito.records import FinishReason, Sampling, VersionSpan
from miles_tito.records.encoding import array_from_extension, array_to_extension
from miles_tito.shared.locks import FileLock

from .tree import Node, NodeKind

SCHEMA_VERSION = 1
"""Raised whenever a record's meaning changes."""
_SUFFIX = ".journal"

_log = logging.getLogger(__name__)


class Opened(msgspec.Struct, tag="opened", frozen=True, kw_only=True):
    """Record: what a session was opened with."""

    schema: int = SCHEMA_VERSION
    session_id: str
    key_digest: bytes
    """The key itself is never written."""
    fingerprint: bytes
    """Of tokenizer and family; other ones would read other ids."""
    family: str | None = None
    """Where it is another than the server's."""
    opened_at: str
    """ISO 8601, the date that templates print."""
    deadline_at: float | None
    """Seconds since the epoch."""
    ttl_s: float | None = None
    sampling: Sampling
    tools: list[Any] = []
    metadata: dict[str, Any]


class Begun(msgspec.Struct, tag="begun", frozen=True, kw_only=True):
    """Record: a turn was sent to the engine."""

    node_id: int
    rid: str
    branch: int


class Recorded(msgspec.Struct, tag="recorded", frozen=True, kw_only=True):
    """Record: a turn was recorded, with all its ids."""

    parent_id: int | None
    fields: dict[str, Any]
    """Of `Node`, but for those that the tree around it gives."""


class GivenUp(msgspec.Struct, tag="given_up", frozen=True, kw_only=True):
    """Record: a turn ended without being recorded."""

    node_id: int


class Delivered(msgspec.Struct, tag="delivered", frozen=True, kw_only=True):
    """Record: the client got the whole answer of a turn."""

    node_id: int


Body = Opened | Begun | Recorded | GivenUp | Delivered


@dataclasses.dataclass(slots=True, kw_only=True)
class Saved:
    """A session as its journal restores it."""

    journal: Journal
    opened: Opened
    nodes: list[Node]
    """By id."""
    interrupted: list[str]
    """Request ids of turns that ran when the server died."""
    num_given_up: int
    next_id: int
    next_branch: int


class Journal:
    """Writes the file of one session; `LiveSession` calls it at every step of a turn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_broken = False

    def begun(self, node: Node) -> None:
        self.append(Begun(node_id=node.id, rid=node.rid, branch=node.branch))

    def recorded(self, node: Node) -> None:
        self.append(Recorded(parent_id=node.parent.id if node.parent else None, fields=_node_fields(node)))

    def given_up(self, node: Node) -> None:
        self.append(GivenUp(node_id=node.id))

    def delivered(self, node: Node) -> None:
        self.append(Delivered(node_id=node.id))

    def append(self, body: Body) -> None:
        """Write one frame; a disk that refuses ends the journal, not the session."""
        if self._is_broken:
            return
        packed = msgspec.msgpack.encode(body, enc_hook=array_to_extension)
        frame = len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little") + packed
        try:
            # Opened for each frame: thousands of sessions must not hold thousands of files open.
            with self.path.open("ab", buffering=0) as file:
                written = file.write(frame)
            if written != len(frame):
                raise OSError(f"{written} of {len(frame)} bytes were written")
        except OSError as error:
            self._is_broken = True
            _log.warning(
                "%s is written no further (%s); a restart would bring its session back without what follows.",
                self.path,
                error,
            )

    def remove(self) -> None:
        """The session ended."""
        self._is_broken = True
        self.path.unlink(missing_ok=True)


class StateDir:
    """The folder with the journals of one server, which it alone may use."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextlib.contextmanager
    def owned(self) -> Generator[None, None, None]:
        """Keep other servers out.

        Raises:
            SessionError: another server has the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            lock = FileLock(self.path / "lock")
        except BlockingIOError as error:
            raise SessionError(
                f"The state folder {self.path} belongs to a session server that runs; give each its own."
            ) from error
        with lock:
            yield

    def create(self, opened: Opened) -> Journal:
        """The journal of a new session."""
        journal = Journal(self.path / f"{opened.session_id}{_SUFFIX}")
        journal.path.unlink(missing_ok=True)
        journal.append(opened)
        return journal

    def read(self, fingerprint: bytes) -> Generator[Saved, None, None]:
        """The sessions of the folder; what cannot be read is left where it is, with a warning."""
        for path in sorted(self.path.glob(f"*{_SUFFIX}")):
            saved = _read(path)
            if saved is None:
                continue
            if saved.opened.fingerprint != fingerprint:
                _log.warning("%s was written with another tokenizer or family and is not restored.", path)
                continue
            yield saved


def _read(path: Path) -> Saved | None:
    data = path.read_bytes()
    opened: Opened | None = None
    nodes: dict[int, Node] = {}
    running: dict[int, Begun] = {}
    given_up = next_id = next_branch = whole = 0
    try:
        for body, end in _frames(data):
            match body:
                case Opened():
                    opened = body
                case Begun(node_id=node_id):
                    running[node_id] = body
                    next_id, next_branch = max(next_id, node_id + 1), max(next_branch, body.branch + 1)
                case Recorded():
                    node = _node(body, nodes)
                    nodes[node.id] = node
                    del running[node.id]
                case GivenUp(node_id=node_id):
                    del running[node_id]
                    given_up += 1
                case Delivered(node_id=node_id):
                    nodes[node_id].is_delivered = True
            whole = end
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s cannot be read behind byte %d (%s) and is not restored.", path, whole, error)
        return None
    if opened is None:
        _log.warning("%s holds no whole record and is not restored.", path)
        return None
    if whole < len(data):
        _log.warning("%s ends in a torn record; its last %d bytes are dropped.", path, len(data) - whole)
        os.truncate(path, whole)
    return Saved(
        journal=Journal(path),
        opened=opened,
        nodes=[nodes[node_id] for node_id in sorted(nodes)],
        interrupted=[begun.rid for begun in running.values()],
        num_given_up=given_up,
        next_id=next_id,
        next_branch=next_branch,
    )


def _frames(data: bytes) -> Generator[tuple[Body, int], None, None]:
    """Each whole frame's body and where it ends."""
    decoder = msgspec.msgpack.Decoder(Body, ext_hook=array_from_extension)
    start = 0
    while start + 8 <= len(data):
        size, checksum = (int.from_bytes(data[at : at + 4], "little") for at in (start, start + 4))
        packed = data[start + 8 : start + 8 + size]
        if len(packed) < size or zlib.crc32(packed) != checksum:
            return
        start += 8 + size
        yield decoder.decode(packed), start


_AROUND = {"parent", "children", "replay", "superseded_by", "is_carried"}
"""Fields of `Node` that follow from the rest."""


def _node_fields(node: Node) -> dict[str, Any]:
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.name not in _AROUND}


def _node(body: Recorded, nodes: Mapping[int, Node]) -> Node:
    fields: dict[str, Any] = {
        **body.fields,
        "parent": None if body.parent_id is None else nodes[body.parent_id],
        "kind": NodeKind(body.fields["kind"]),
        "finish_reason": FinishReason(body.fields["finish_reason"]),
        "versions": tuple(VersionSpan(**span) for span in body.fields["versions"]),
    }
    return Node(**fields)
