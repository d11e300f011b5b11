"""Finished groups on disk before anything trains on them.

One append-only file a worker, `trajectories/<worker>.spool`, holds records of

    magic b"MSPL" | u32 compressed length | u32 crc32 of the payload | payload (zstd of the group's msgpack)

A record is flushed to the device before `append` returns, so a group that the buffer has admitted survives
`kill -9`. A torn last record (the writer died in the middle) is skipped by readers and cut off by the next writer;
a damaged one before the end is an error. The driver appends one line a group to `trajectories/index.jsonl` when its
fate is known.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard
from miles_tito.errors import MilesError
from miles_tito.records import Group
from miles_tito.wire import decode, encode

_HEADER = struct.Struct("<4sII")
_MAGIC = b"MSPL"


class SpoolError(MilesError, OSError):
    """A spooled group cannot be written or read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolAddress:
    """Where a group lies: file name inside `trajectories/`, byte offset."""

    file: str
    offset: int


class SpoolWriter:
    """Appends groups to one file; a single process owns it, one thread at a time."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._name = f"{name}.spool"
        self._fd = os.open(directory / self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._offset = _end_of_whole_records(directory / self._name)
        os.ftruncate(self._fd, self._offset)  # nothing behind a torn record would ever be read
        self._compressor = zstandard.ZstdCompressor(level=1)

    def append(self, group: Group) -> SpoolAddress:
        """Write `group` durably; raises SpoolError when the disk refuses it, and leaves the file as it was."""
        payload = self._compressor.compress(encode(group))
        record = _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        try:
            self._write(record)
        except OSError as error:
            os.ftruncate(self._fd, self._offset)
            raise SpoolError(
                f"Cannot spool group {group.id} ({len(record)} bytes) to {self._name}: {error}. "
                "Free disk space under the run directory."
            ) from error
        address = SpoolAddress(file=self._name, offset=self._offset)
        self._offset += len(record)
        return address

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, record: bytes) -> None:
        rest = memoryview(record)
        while rest:  # a nearly full disk takes a part of it; the next write says why not more
            rest = rest[os.write(self._fd, rest) :]
        os.fdatasync(self._fd)


def read_group(directory: Path, address: SpoolAddress) -> Group:
    """The group at `address`; raises SpoolError when the record is torn or damaged."""
    with (directory / address.file).open("rb") as file:
        file.seek(address.offset)
        payload = _read_payload(file)
    if payload is None:
        raise SpoolError(f"No whole group at offset {address.offset} of {address.file}: the file ends before it does.")
    return _group(payload)


def read_groups(path: Path) -> Iterator[Group]:
    """Every whole group of one spool file, in the order written; raises SpoolError at a damaged one."""
    with path.open("rb") as file:
        while (payload := _read_payload(file)) is not None:
            yield _group(payload)


def _end_of_whole_records(path: Path) -> int:
    """Bytes up to the end of the last whole record."""
    with path.open("rb") as file:
        while True:
            end = file.tell()
            if _read_payload(file) is None:
                return end


def _read_payload(file: BinaryIO) -> bytes | None:
    """The next record's payload; None at the end of the file or where it ends inside the record."""
    offset = file.tell()
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise SpoolError(
            f"{file.name} is damaged: offset {offset} holds {magic!r} where a record begins with {_MAGIC!r}."
        )
    payload = file.read(length)
    if len(payload) < length:
        return None
    if zlib.crc32(payload) != checksum:
        raise SpoolError(
            f"{file.name} is damaged: the {length} bytes of the record at offset {offset} have checksum "
            f"{zlib.crc32(payload):08x}, written was {checksum:08x}."
        )
    return payload


def _group(payload: bytes) -> Group:
    return decode(zstandard.ZstdDecompressor().decompress(payload), Group)
