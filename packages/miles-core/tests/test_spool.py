"""Groups on disk: whole ones come back, torn ones are cut off, damaged ones are told, a full disk changes nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_records import make_group
from miles_core.spool import SpoolAddress, SpoolError, SpoolWriter, read_group, read_groups
from miles_tito.records import Group
from miles_tito.wire import encode

GROUPS = [make_group("a", [[5], [7]]), make_group("b", [[4, 6], []], [1.0, None]), make_group("c", [[300]], [0.5])]


def spool(folder: Path, groups: list[Group], name: str = "worker-0") -> list[SpoolAddress]:
    writer = SpoolWriter(folder, name)
    addresses = [writer.append(group) for group in groups]
    writer.close()
    return addresses


def same(one: Group, other: Group) -> bool:
    return encode(one) == encode(other)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses to grow any file of this process beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_groups_come_back_by_address_and_in_order(tmp_path: Path) -> None:
    addresses = spool(tmp_path, GROUPS)
    assert all(same(read_group(tmp_path, address), group) for address, group in zip(addresses, GROUPS, strict=True))
    read = list(read_groups(tmp_path / "worker-0.spool"))
    assert [group.id for group in read] == ["a", "b", "c"]
    assert all(same(one, other) for one, other in zip(read, GROUPS, strict=True))


def test_a_file_cut_at_any_byte_yields_the_groups_before_the_cut(tmp_path: Path) -> None:
    _, second, third = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.spool"
    content = file.read_bytes()
    for cut in range(second.offset, len(content)):
        file.write_bytes(content[:cut])
        expected = ["a"] if cut < third.offset else ["a", "b"]
        assert [group.id for group in read_groups(file)] == expected, f"cut at byte {cut}"
    with pytest.raises(SpoolError, match=f"No whole group at offset {third.offset} of worker-0.spool"):
        read_group(tmp_path, third)


def test_a_new_writer_continues_behind_the_last_whole_record(tmp_path: Path) -> None:
    _, second, third = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.spool"
    file.write_bytes(file.read_bytes()[: third.offset - 3])  # the writer died inside the second record
    (again,) = spool(tmp_path, [GROUPS[2]])
    assert again == second
    assert [group.id for group in read_groups(file)] == ["a", "c"]


@pytest.mark.parametrize("at", [0, 2, 9, 40], ids=["magic", "magic's end", "checksum", "payload"])
def test_a_flipped_bit_is_an_error_with_its_place_and_not_the_end_of_the_file(tmp_path: Path, at: int) -> None:
    _, second, _ = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.spool"
    content = bytearray(file.read_bytes())
    content[second.offset + at] ^= 4
    file.write_bytes(content)
    groups = read_groups(file)
    assert next(groups).id == "a"
    with pytest.raises(SpoolError, match=f"worker-0.spool is damaged: .*offset {second.offset}"):
        next(groups)
    with pytest.raises(SpoolError, match="damaged"):
        read_group(tmp_path, second)


def test_a_full_disk_is_an_error_that_leaves_the_file_whole_and_the_writer_usable(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "w")
    writer.append(GROUPS[0])
    before = (tmp_path / "w.spool").read_bytes()
    with (
        files_limited_to(len(before) + 20),
        pytest.raises(SpoolError, match=r"Cannot spool group c \(\d+ bytes\) to w.spool: .*Free disk space"),
    ):
        writer.append(GROUPS[2])
    assert (tmp_path / "w.spool").read_bytes() == before
    address = writer.append(GROUPS[1])
    writer.close()
    assert address.offset == len(before)
    assert same(read_group(tmp_path, address), GROUPS[1])


def test_a_record_that_did_not_reach_the_device_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    writer = SpoolWriter(tmp_path, "w")
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(SpoolError, match=r"group a .*Input/output error"):
        writer.append(GROUPS[0])
    writer.close()
    assert (tmp_path / "w.spool").read_bytes() == b""


def test_a_write_that_takes_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    writer = SpoolWriter(tmp_path, "w")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    address = writer.append(GROUPS[0])
    monkeypatch.undo()
    writer.close()
    assert same(read_group(tmp_path, address), GROUPS[0])
