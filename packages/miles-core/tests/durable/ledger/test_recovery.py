"""Groups that are in the spool but not in the ledger, because the run was killed in between."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from core_records import make_group
from ledger_life import event, issue, reopen
from miles_core.durable.ledger import Ledger
from miles_core.durable.spool import SpoolAddress, SpoolWriter
from miles_rollout.fates import Fate
from miles_tito.records import Group
from miles_tito.records.summary import summarize


def at_attempt(group: Group, attempt: int) -> Group:
    return replace(group, episodes=tuple(replace(episode, attempt=attempt) for episode in group.episodes))


def test_a_group_that_nobody_was_told_of_is_not_run_again(ledger: Ledger, tmp_path: Path) -> None:
    issue(ledger, "g0", "g1", "g2", "g3")
    writer = SpoolWriter(tmp_path, "worker-0")
    known, _, lost = (writer.append(make_group(name, [[5], [6]])) for name in ("g0", "stranger", "g2"))
    ledger.finished(replace(summarize(make_group("g0", [[5], [6]])), metadata={"spool": (known.file, known.offset)}))
    ledger(event("g3", Fate.ABORTED))
    writer.append(make_group("g3", [[5], [6]]))
    again = reopen(ledger)
    assert again.recover_spooled(tmp_path) == 1
    assert again.recover_spooled(tmp_path) == 0
    again.start(0)
    assert [(group.id, group.address) for group in again.open_groups()] == [("g0", known), ("g1", None), ("g2", lost)]
    assert again.verify() == []
    again.close()
    writer.close()


def test_a_record_of_an_attempt_that_was_given_up_is_left(ledger: Ledger, tmp_path: Path) -> None:
    issue(ledger, "g0")
    again = reopen(ledger)
    again.start(0)
    writer = SpoolWriter(tmp_path, "worker-0")
    writer.append(at_attempt(make_group("g0", [[5], [6]]), 1))
    writer.append(at_attempt(make_group("g0", [[5], [6]]), 2))
    writer.close()
    again = reopen(again)
    assert again.recover_spooled(tmp_path) == 1
    again.start(0)
    (group,) = again.open_groups()
    assert group.address is not None
    assert group.address.offset > 0
    again.close()


def test_files_that_were_not_written_since_are_not_opened(ledger: Ledger, tmp_path: Path) -> None:
    issue(ledger, "g0")
    for name in ("old", "new"):
        writer = SpoolWriter(tmp_path, name)
        writer.append(make_group("g0", [[5], [6]]))
        writer.close()
    os.utime(tmp_path / "old.000.spool", (1.0, 1.0))
    again = reopen(ledger)
    assert again.recover_spooled(tmp_path) == 1
    again.start(0)
    assert again.open_groups()[0].address == SpoolAddress(file="new.000.spool", offset=0)
    again.close()


def test_a_damaged_record_runs_again_and_does_not_keep_the_run_from_going_on(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    issue(ledger, "g0", "g1", "g2", "g3")
    writer = SpoolWriter(tmp_path, "worker-0")
    first, second, _, last = (writer.append(make_group(f"g{n}", [[5], [6]])) for n in range(4))
    writer.close()
    file = tmp_path / first.file
    content = bytearray(file.read_bytes())
    content[second.offset + 50] ^= 1  # in its payload
    file.write_bytes(content[: last.offset + 30])  # and the last is torn
    again = reopen(ledger)
    with caplog.at_level(logging.WARNING):
        assert again.recover_spooled(tmp_path) == 2
    assert "have checksum" in caplog.text
    again.start(0)
    assert [group.address is not None for group in again.open_groups()] == [True, False, True, False]
    again.close()
