"""Finished groups on disk before anything trains on them.

Each worker appends to a file of its own, `trajectories/worker-0.000.spool`: a new one at each start of a worker, and
when it has grown large. A file holds records of

    magic b"MSPL" | u16 length of the id | u64 length of the payload | u32 crc32 of both | id | payload

with the zstd of the group's msgpack as payload. A record is flushed to the device before `append` returns, so a group
that the buffer has admitted survives `kill -9`. A torn last record (the writer died in the middle) is skipped by
readers; a damaged one before the end is an error. Which group became what, `ledger.db` says.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard
from miles_tito.errors import MilesError
from miles_tito.records import Group
from miles_tito.records.encoding import decode, encode
from miles_tito.records.summary import GroupRef, summarize
from miles_tito.shared.files import sync

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sHQI")
_MAGIC = b"MSPL"
SEGMENT_BYTES = 1 << 30
"""A file that has grown to this is followed by a new one."""
CLOCK_SLACK_S = 3600.0
"""Clocks of a worker's file system and of the driver may differ by this."""


class SpoolError(MilesError, OSError):
    """A spooled group cannot be written or read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolAddress:
    """Where a group lies: file name inside `trajectories/`, byte offset."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """How a trainer rank gets at a group: from the object store while its owner lives, from the spool afterwards."""

    ref: Any
    """Reference into the object store; None where the group lies in the spool alone."""
    address: SpoolAddress | None
    directory: Path | None
    """The `trajectories/` that `address` means."""


class SpoolWriter:
    """A worker's way to disk: appends each finished group to a file that it alone writes, from one thread at a time."""

    def __init__(self, directory: Path, name: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._name = name
        self._segment_bytes = segment_bytes
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._open_segment()

    def append(self, group: Group) -> SpoolAddress:
        """Write `group` durably; raises SpoolError when the disk refuses it, and leaves the file as it was."""
        if self._offset >= self._segment_bytes:
            os.close(self._fd)
            self._open_segment()
        name, payload = group.id.encode(), self._compressor.compress(encode(group))
        checksum = zlib.crc32(payload, zlib.crc32(name))
        record = _HEADER.pack(_MAGIC, len(name), len(payload), checksum) + name + payload
        try:
            self._write(record)
        except OSError as error:
            os.ftruncate(self._fd, self._offset)
            raise SpoolError(
                f"Cannot spool group {group.id} ({len(record)} bytes) to {self._file}: {error}. "
                "Free disk space under the run directory."
            ) from error
        address = SpoolAddress(file=self._file, offset=self._offset)
        self._offset += len(record)
        return address

    def close(self) -> None:
        os.close(self._fd)

    def _open_segment(self) -> None:
        """A file that did not exist: what an earlier writer left, torn or not, stays as it is."""
        number = _last_segment(self._directory, self._name) + 1
        while True:
            self._file = f"{self._name}.{number:03d}.spool"
            try:
                self._fd = os.open(
                    self._directory / self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
                )
                break
            except FileExistsError:
                number += 1
            except OSError as error:
                raise SpoolError(f"Cannot create {self._directory / self._file}: {error}.") from error
        self._offset = 0
        sync(self._directory)  # a file that the folder forgets holds nothing durably

    def _write(self, record: bytes) -> None:
        rest = memoryview(record)
        while rest:  # a nearly full disk takes a part of it; the next write says why not more
            rest = rest[os.write(self._fd, rest) :]
        os.fdatasync(self._fd)


def spooled(group: Group, address: SpoolAddress, directory: Path, *, stored: Any = None) -> GroupRef:
    """What the driver keeps of a group that lies at `address`; `stored` is its reference in the object store."""
    ref = summarize(group, handle=GroupHandle(ref=stored, address=address, directory=directory))
    return replace(ref, metadata={**ref.metadata, "spool": (address.file, address.offset)})


def read_group(directory: Path, address: SpoolAddress) -> Group:
    """The group at `address`; raises SpoolError when the record is absent, torn or damaged."""
    try:
        with (directory / address.file).open("rb") as file:
            file.seek(address.offset)
            payload = _read_payload(file)
    except FileNotFoundError as error:
        raise SpoolError(
            f"{directory / address.file} is gone, and with it the group at offset {address.offset}."
        ) from error
    if payload is None:
        raise SpoolError(f"No whole group at offset {address.offset} of {address.file}: the file ends before it does.")
    return _group(payload)


def read_groups(path: Path) -> Iterator[Group]:
    """Every whole group of one spool file, in the order written; raises SpoolError at a damaged one."""
    with path.open("rb") as file:
        while (payload := _read_payload(file)) is not None:
            yield _group(payload)


def read_ids(path: Path) -> Iterator[tuple[str, SpoolAddress]]:
    """Id and address of every whole record of one spool file; payloads are jumped over, not read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while (head := _read_header(file)) is not None:
            offset, id_length, length, _ = head
            name = file.read(id_length)
            if file.tell() + length > size:
                return
            yield name.decode(errors="replace"), SpoolAddress(file=path.name, offset=offset)
            file.seek(length, os.SEEK_CUR)


def find_groups(directory: Path, wanted: Collection[str], *, since: float) -> Iterator[GroupRef]:
    """Groups whose id is in `wanted`, from files written since `since` (seconds since 1970).

    A damaged record is passed over with a warning, and what lies behind a damaged header.
    """
    for path in sorted(directory.glob("*.spool")) if wanted else ():
        if path.stat().st_mtime < since - CLOCK_SLACK_S:
            continue
        try:
            for group_id, address in read_ids(path):
                if group_id in wanted:
                    try:
                        group = read_group(directory, address)
                    except SpoolError as error:
                        logger.warning("left out, its group runs again: %s", error)
                    else:
                        yield spooled(group, address, directory)
        except SpoolError as error:
            logger.warning("what lies behind is left out, its groups run again: %s", error)


def fetch_groups(
    handles: Sequence[Any], *, get: Callable[[list[Any]], list[Group]], lost: tuple[type[Exception], ...]
) -> list[Group]:
    """The groups behind `handles`: from the object store, and from the spool where that has lost them.

    Args:
        handles: `GroupHandle`s, or bare references of groups that are in no spool.
        get: fetches references from the object store.
        lost: what `get` raises when an object is gone, for example with the worker that owned it.
    """
    refs = [handle.ref if isinstance(handle, GroupHandle) else handle for handle in handles]
    if all(ref is not None for ref in refs):
        try:
            return get(refs)
        except lost:
            pass  # some of them are gone; which ones, each shows by itself
    return [_fetch(handle, ref, get, lost) for handle, ref in zip(handles, refs, strict=True)]


def _fetch(handle: Any, ref: Any, get: Callable[[list[Any]], list[Group]], lost: tuple[type[Exception], ...]) -> Group:
    if ref is not None:
        try:
            return get([ref])[0]
        except lost:
            if not isinstance(handle, GroupHandle) or handle.address is None:
                raise
    assert isinstance(handle, GroupHandle), "only a handle has no reference"
    if handle.address is None or handle.directory is None:
        raise SpoolError("A group is neither in the object store nor in a spool; its worker never wrote it down.")
    return read_group(handle.directory, handle.address)


def _last_segment(directory: Path, name: str) -> int:
    """The highest number that a file of `name` carries; -1 for none."""
    pattern = re.compile(re.escape(name) + r"\.(\d+)\.spool")
    found = (pattern.fullmatch(path.name) for path in directory.iterdir())
    return max((int(match[1]) for match in found if match), default=-1)


def _read_header(file: BinaryIO) -> tuple[int, int, int, int] | None:
    """Offset of the next record, lengths of its id and payload, checksum; None at the end, torn or not."""
    offset = file.tell()
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, id_length, length, checksum = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise SpoolError(
            f"{file.name} is damaged: offset {offset} holds {magic!r} where a record begins with {_MAGIC!r}."
        )
    return offset, id_length, length, checksum


def _read_payload(file: BinaryIO) -> bytes | None:
    """The next record's payload; None at the end of the file or where it ends inside the record."""
    head = _read_header(file)
    if head is None:
        return None
    offset, id_length, length, checksum = head
    body = file.read(id_length + length) if id_length + length <= os.fstat(file.fileno()).st_size - file.tell() else b""
    if len(body) < id_length + length:
        return None
    if zlib.crc32(body) != checksum:
        raise SpoolError(
            f"{file.name} is damaged: the {len(body)} bytes of the record at offset {offset} have checksum "
            f"{zlib.crc32(body):08x}, written was {checksum:08x}."
        )
    return body[id_length:]


def _group(payload: bytes) -> Group:
    return decode(zstandard.ZstdDecompressor().decompress(payload), Group)
