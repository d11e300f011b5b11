"""Finished groups on disk before anything trains on them.

One append-only file a worker, `trajectories/<worker>.spool`, holds records of

    magic b"MSPL" | u32 compressed length | u32 crc32 of the payload | payload (zstd of the group's msgpack)

A record is flushed to the device before `append` returns, so a group that the buffer has admitted survives
`kill -9`. A torn last record (the writer died in the middle) is skipped by readers and overwritten by nobody.
The driver appends one line a group to `trajectories/index.jsonl` when its fate is known.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """Appends groups to one file; a single process owns it."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._name = f"{name}.spool"
        self._fd = os.open(directory / self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._offset = os.fstat(self._fd).st_size
        self._compressor = zstandard.ZstdCompressor(level=1)

    def append(self, group: Group) -> SpoolAddress:
        """Write `group` durably; raises SpoolError when the disk refuses it."""
        payload = self._compressor.compress(encode(group))
        record = _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._fd, record)
            if written != len(record):
                raise OSError(f"only {written} of {len(record)} bytes were written")
            os.fdatasync(self._fd)
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


def read_group(directory: Path, address: SpoolAddress) -> Group:
    """The group at `address`; raises SpoolError when the record is torn or damaged."""
    with (directory / address.file).open("rb") as file:
        file.seek(address.offset)
        group = _read_record(file.read)
    if group is None:
        raise SpoolError(f"No whole group at offset {address.offset} of {address.file}.")
    return group


def read_groups(path: Path) -> Iterator[Group]:
    """Every whole group of one spool file, in the order written."""
    with path.open("rb") as file:
        while (group := _read_record(file.read)) is not None:
            yield group


def _read_record(read: Callable[[int], bytes]) -> Group | None:
    header = read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack(header)
    payload = read(length)
    if magic != _MAGIC or len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    return decode(zstandard.ZstdDecompressor().decompress(payload), Group)
