"""Groups on disk: whole ones come back, torn ones are cut off, damaged ones are told, a full disk changes nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_records import make_group
from miles_core.durable.spool import (
    GroupHandle,
    SpoolAddress,
    SpoolError,
    SpoolWriter,
    fetch_groups,
    read_group,
    read_groups,
    read_ids,
)
from miles_tito.records import Group
from miles_tito.records.encoding import encode

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
    read = list(read_groups(tmp_path / "worker-0.000.spool"))
    assert [group.id for group in read] == ["a", "b", "c"]
    assert all(same(one, other) for one, other in zip(read, GROUPS, strict=True))


def test_a_file_cut_at_any_byte_yields_the_groups_before_the_cut(tmp_path: Path) -> None:
    _, second, third = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.000.spool"
    content = file.read_bytes()
    for cut in range(second.offset, len(content)):
        file.write_bytes(content[:cut])
        expected = ["a"] if cut < third.offset else ["a", "b"]
        assert [group.id for group in read_groups(file)] == expected, f"cut at byte {cut}"
    with pytest.raises(SpoolError, match=f"No whole group at offset {third.offset} of worker-0.000.spool"):
        read_group(tmp_path, third)


def test_a_new_writer_leaves_the_files_of_earlier_ones_as_they_are(tmp_path: Path) -> None:
    *_, third = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.000.spool"
    file.write_bytes(torn := file.read_bytes()[: third.offset + 9])  # the writer died inside the third record
    (again,) = spool(tmp_path, [GROUPS[2]])
    assert again == SpoolAddress(file="worker-0.001.spool", offset=0)
    assert file.read_bytes() == torn
    assert [group.id for path in sorted(tmp_path.iterdir()) for group in read_groups(path)] == ["a", "b", "c"]


def test_a_file_that_has_grown_large_is_followed_by_a_new_one(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "worker-0", segment_bytes=1)
    addresses = [writer.append(group) for group in GROUPS]
    writer.close()
    assert [address.file for address in addresses] == [f"worker-0.00{n}.spool" for n in range(3)]
    assert all(same(read_group(tmp_path, address), group) for address, group in zip(addresses, GROUPS, strict=True))


def test_workers_whose_names_begin_alike_have_files_of_their_own(tmp_path: Path) -> None:
    spool(tmp_path, GROUPS, name="worker-10")
    assert spool(tmp_path, GROUPS[:1], name="worker-1")[0].file == "worker-1.000.spool"
    assert spool(tmp_path, GROUPS[:1], name="worker-10")[0].file == "worker-10.001.spool"


def test_ids_are_found_without_reading_what_lies_between(tmp_path: Path) -> None:
    addresses = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.000.spool"
    content = file.read_bytes()
    assert list(read_ids(file)) == list(zip("abc", addresses, strict=True))
    for cut in range(addresses[2].offset, len(content)):
        file.write_bytes(content[:cut])
        assert [group_id for group_id, _ in read_ids(file)] == ["a", "b"], f"cut at byte {cut}"


class Lost(Exception):
    """As Ray's, of an object whose owner died."""


def test_a_group_that_the_object_store_lost_comes_from_the_spool(tmp_path: Path) -> None:
    stored = {"ref-a": GROUPS[0]}
    asked: list[list[str]] = []

    def get(refs: list[str]) -> list[Group]:
        asked.append(refs)
        if any(ref not in stored for ref in refs):
            raise Lost
        return [stored[ref] for ref in refs]

    handles = [
        GroupHandle(ref=ref, address=address, directory=tmp_path)
        for ref, address in zip(["ref-a", "ref-b", None], spool(tmp_path, GROUPS), strict=True)
    ]
    fetched = fetch_groups(handles, get=get, lost=(Lost,))
    assert all(same(one, other) for one, other in zip(fetched, GROUPS, strict=True))
    assert fetch_groups(["ref-a"], get=get, lost=(Lost,)) == [GROUPS[0]]
    assert asked == [["ref-a"], ["ref-b"], ["ref-a"]]
    assert fetch_groups([handles[0], "ref-a"], get=get, lost=(Lost,)) == [GROUPS[0]] * 2
    with pytest.raises(Lost):
        fetch_groups(["ref-z"], get=get, lost=(Lost,))
    nowhere = GroupHandle(ref=None, address=None, directory=None)
    with pytest.raises(SpoolError, match="neither in the object store nor in a spool"):
        fetch_groups([nowhere], get=get, lost=(Lost,))
    gone = GroupHandle(ref="ref-z", address=SpoolAddress(file="w.000.spool", offset=5), directory=tmp_path)
    with pytest.raises(SpoolError, match=r"w\.000\.spool is gone, and with it the group at offset 5"):
        fetch_groups([gone], get=get, lost=(Lost,))


@pytest.mark.parametrize("at", [0, 2, 15, 18, 40], ids=["magic", "magic's end", "checksum", "id", "payload"])
def test_a_flipped_bit_is_an_error_with_its_place_and_not_the_end_of_the_file(tmp_path: Path, at: int) -> None:
    _, second, _ = spool(tmp_path, GROUPS)
    file = tmp_path / "worker-0.000.spool"
    content = bytearray(file.read_bytes())
    content[second.offset + at] ^= 4
    file.write_bytes(content)
    groups = read_groups(file)
    assert next(groups).id == "a"
    with pytest.raises(SpoolError, match=f"worker-0.000.spool is damaged: .*offset {second.offset}"):
        next(groups)
    with pytest.raises(SpoolError, match="damaged"):
        read_group(tmp_path, second)


def test_a_full_disk_is_an_error_that_leaves_the_file_whole_and_the_writer_usable(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, "w")
    writer.append(GROUPS[0])
    before = (tmp_path / "w.000.spool").read_bytes()
    with (
        files_limited_to(len(before) + 20),
        pytest.raises(SpoolError, match=r"Cannot spool group c \(\d+ bytes\) to w.000.spool: .*Free disk space"),
    ):
        writer.append(GROUPS[2])
    assert (tmp_path / "w.000.spool").read_bytes() == before
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
    assert (tmp_path / "w.000.spool").read_bytes() == b""


def test_a_write_that_takes_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    writer = SpoolWriter(tmp_path, "w")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    address = writer.append(GROUPS[0])
    monkeypatch.undo()
    writer.close()
    assert same(read_group(tmp_path, address), GROUPS[0])
