"""The file itself: killed writers, logs that end anywhere, readers beside a writer, full disks, damage, old schemas."""

from __future__ import annotations

import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_life import event, finish, issue, make_ref, train
from miles_core.durable.ledger import Ledger, LedgerError, Limits, overview, why
from miles_core.durable.ledger.schema import APPLICATION_ID, SCHEMA_VERSION, STEPS
from miles_rollout.fates import Fate

WRITER = Path(__file__).with_name("busy_writer.py")


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """The kernel refuses to grow any file of this process beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def killed_after(path: Path, num_lines: int) -> list[str]:
    """What a busy writer had said when it was killed; it goes on while the signal is under way."""
    with subprocess.Popen([sys.executable, str(WRITER), str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(num_lines)]
        writer.kill()
        return [*lines, *(line for line in writer.stdout if line.endswith("\n"))]


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_writer_leaves_everything_that_it_had_said(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "ledger.db", random.Random(seed)
    issued: list[str] = []
    for _ in range(3):
        said = [line.split() for line in killed_after(path, rng.randrange(1, 400))]
        issued += [name for what, name in said if what == "issued"]
        newest = max((int(version) for what, version in said if what == "committed"), default=None)
        ledger = Ledger.open(path)
        with sqlite3.connect(path) as db:
            known = [name for (name,) in db.execute("SELECT group_id FROM groups ORDER BY number")]
            (committed,) = db.execute("SELECT max(version) FROM steps WHERE committed_at IS NOT NULL").fetchone()
        db.close()
        assert known[: len(issued)] == issued
        assert len(known) <= len(issued) + 1, "the last one may have been killed before it was said"
        issued = known
        assert newest is None or committed >= newest
        assert ledger.verify() == []
        ledger.close()
    assert issued == [f"g{n:06d}" for n in range(len(issued))]


def test_a_log_that_ends_anywhere_is_a_run_that_stopped_earlier(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.db", create=True)
    ledger.start(0)
    for n in range(12):
        issue(ledger, f"g{n}")
        finish(ledger, f"g{n}")
    for n in range(8):
        train(ledger, n + 1, f"g{n}")
    database, log = (tmp_path / "ledger.db").read_bytes(), (tmp_path / "ledger.db-wal").read_bytes()
    seen = set()
    rng = random.Random(0)
    for cut in sorted([len(log), *(rng.randrange(len(log)) for _ in range(40))]):
        copy = tmp_path / f"cut-{cut}"
        copy.mkdir()
        (copy / "ledger.db").write_bytes(database)
        (copy / "ledger.db-wal").write_bytes(log[:cut])
        again = Ledger.open(copy / "ledger.db")
        assert again.verify() == []
        counts = again.counts()
        seen.add((counts.issued, counts.trained))
        if not again.is_new:
            again.start(0)
            assert again.verify() == []
        again.close()
        shutil.rmtree(copy)
    assert max(seen) == (12, 8)
    assert len(seen) > 10
    ledger.close()


def test_readers_see_whole_transactions_while_the_run_writes(ledger: Ledger, tmp_path: Path) -> None:
    for n in range(8):
        issue(ledger, f"g{n}")
        finish(ledger, f"g{n}")
        ledger._db.execute("BEGIN IMMEDIATE")  # pyright: ignore[reportPrivateUsage]  (a transaction under way)
        ledger._db.execute("UPDATE groups SET fate = 'trained'")  # pyright: ignore[reportPrivateUsage]
        found = overview(tmp_path / "ledger.db")
        assert (found["problems"], found["fates"]) == ([], [{"fate": "buffered", "reason": "", "groups": n + 1}])
        assert "waits in the buffer" in why(tmp_path / "ledger.db", f"g{n}")
        ledger._db.execute("ROLLBACK")  # pyright: ignore[reportPrivateUsage]


def test_a_reader_neither_blocks_the_run_nor_is_blocked(ledger: Ledger, tmp_path: Path) -> None:
    issue(ledger, "g0")
    db = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    db.execute("BEGIN")
    assert db.execute("SELECT count(*) FROM groups").fetchone() == (1,)
    issue(ledger, "g1")
    ledger.commit(0, "step-000000")
    assert db.execute("SELECT count(*) FROM groups").fetchone() == (1,), "what it began with"
    db.close()


def test_a_full_disk_ends_the_run_and_what_was_written_before_is_kept(ledger: Ledger, tmp_path: Path) -> None:
    issue(ledger, "g0", "g1")
    finish(ledger, "g0")
    log = (tmp_path / "ledger.db-wal").stat().st_size
    with (
        files_limited_to(log + 100),
        pytest.raises(LedgerError, match=r"ledger.db cannot be written: .* can be resumed"),
    ):
        train(ledger, 1, "g0")
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.commit(1, "step-000001")
    ledger.close()
    again = Ledger.open(tmp_path / "ledger.db")
    assert [(group.id, group.is_admitted) for group in again.open_groups()] == [("g0", True), ("g1", False)]
    again.start(0)
    train(again, 1, "g0")
    assert again.verify() == []
    again.close()


@pytest.mark.parametrize("at", [0, 20, 100, 4096, 8192, 12288])
def test_a_damaged_file_is_told_and_not_taken_for_an_empty_one(ledger: Ledger, tmp_path: Path, at: int) -> None:
    for n in range(50):
        issue(ledger, f"g{n}")
    ledger.close()
    file = tmp_path / "ledger.db"
    content = bytearray(file.read_bytes())
    content[at : at + 2000] = random.Random(at).randbytes(2000)
    file.write_bytes(content)

    def look() -> None:
        again = Ledger.open(file)
        try:
            again.require_sound()
        finally:
            again.close()

    with pytest.raises(LedgerError, match=r"ledger\.db"):
        look()
    with pytest.raises((LedgerError, AssertionError)):
        assert overview(file)["problems"] == []


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    empty = tmp_path / "empty.db"
    empty.touch()
    text = tmp_path / "text.db"
    text.write_text("no database at all, but long enough to have a header of a hundred bytes " * 9)
    for read in (Ledger.open, overview):
        with pytest.raises(LedgerError, match="is no ledger of Miles: its application id is 0x0"):
            read(other)
        with pytest.raises(LedgerError, match="cannot be read: file is not a database"):
            read(text)
    with pytest.raises(LedgerError, match="is empty: its run ended before it began"):
        overview(empty)
    ledger = Ledger.open(empty)
    assert ledger.is_new, "a run that was killed before its first transaction can still begin"
    ledger.close()


def test_a_process_that_dies_while_the_tables_are_made_leaves_a_file_that_opens(tmp_path: Path) -> None:
    for done in range(SCHEMA_VERSION + 1):
        path = tmp_path / f"{done}.db"
        db = sqlite3.connect(path)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for number in range(done):
            db.executescript(f"BEGIN; {STEPS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
        db.close()
        ledger = Ledger.open(path)
        ledger.start(0)
        assert ledger.verify() == []
        ledger.close()


@pytest.fixture
def first_schema(tmp_path: Path) -> Path:
    """A run as the first schema kept it: g0 was trained in step 1, g1 runs."""
    path = tmp_path / "ledger.db"
    db = sqlite3.connect(path)
    db.executescript(f"""
        PRAGMA application_id = {APPLICATION_ID};
        {STEPS[0]}
        INSERT INTO starts VALUES (0, 0, 1.0, 0, 0, 2, 8, 1, '{{}}');
        INSERT INTO segments VALUES (1, 'worker-0.000.spool');
        INSERT INTO groups VALUES (0, 'g0', 'p-g0', 'trained', '', 0, 2.0, 0, 0, 1, NULL, 0, 3.0, 1, 0, 0, 0);
        INSERT INTO groups (number, group_id, prompt_id, fate, reason, issued_start, issued_at, issued_version, attempt,
            drawn, is_retry_due) VALUES (1, 'g1', 'p-g1', 'in_flight', '', 0, 2.0, 0, 0, 2, 0);
        INSERT INTO changes VALUES (1, 0, 'issued', '', 0, 0, 2.0), (2, 1, 'issued', '', 0, 0, 2.0),
            (3, 0, 'buffered', '', 0, 0, 3.0), (4, 0, 'trained', '', 1, 0, 4.0);
        INSERT INTO episodes VALUES (0, 0, 'g0/0', 'graded', 1.0, NULL, 0, 1.0, 3.0, 1, 9, 5, 0, 0, 0);
        INSERT INTO steps VALUES (1, 1, 0, 4.0, 5.0, 'step-000001', NULL);
        INSERT INTO step_groups VALUES (1, 0, 1);
        PRAGMA user_version = 1;
    """)
    db.close()
    return path


def test_an_older_schema_is_brought_up_to_date_and_the_run_goes_on(first_schema: Path) -> None:
    ledger = Ledger.open(first_schema)
    assert ledger.start(1, limits=Limits(max_staleness=2, credits=8)) == 1
    assert [(group.id, group.attempt) for group in ledger.open_groups()] == [("g1", 2)]
    finish(ledger, "g1")
    ledger(event("g1", Fate.TRAINED, version=2))
    ledger.step(2, [make_ref("g1")], facts={"seconds": 3.0})
    ledger.event("engine", "rollout-0", "died")
    assert (ledger.counts().trained, ledger.verify()) == (2, [])
    ledger.close()
    with sqlite3.connect(first_schema) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert db.execute("SELECT facts FROM steps ORDER BY version").fetchall() == [("{}",), ('{"seconds": 3.0}',)]
    db.close()


def test_a_reader_of_an_older_schema_leaves_the_file_as_it_is(first_schema: Path) -> None:
    before = first_schema.read_bytes()
    assert overview(first_schema)["problems"] == []
    assert why(first_schema, "g0").startswith("Group g0 of prompt p-g0 was trained in step 1.")
    assert first_schema.read_bytes() == before


def test_a_newer_schema_is_refused(first_schema: Path) -> None:
    with sqlite3.connect(first_schema) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    for read in (Ledger.open, overview):
        with pytest.raises(LedgerError, match=r"has schema 99, written by a newer Miles; .* up to 2\. Upgrade"):
            read(first_schema)


def test_the_names_of_the_first_release_are_there() -> None:
    import miles_core.durable.ledger
    import miles_core.ledger

    assert miles_core.ledger.__all__ == miles_core.durable.ledger.__all__
    for name in miles_core.ledger.__all__:
        assert getattr(miles_core.ledger, name) is getattr(miles_core.durable.ledger, name)
    assert "adopt_spooled" in miles_core.ledger.__all__


@pytest.fixture
def first_release(tmp_path: Path) -> Path:
    """A ledger as version 0.1 wrote it: g000000 was trained and committed, g000002 in a step that a crash undid."""
    path = tmp_path / "ledger.db"
    db = sqlite3.connect(path)
    db.executescript(Path(__file__).with_name("ledger_0_1.sql").read_text(encoding="utf-8"))
    db.close()
    return path


def test_a_ledger_of_the_first_release_is_read_as_it_was_written(first_release: Path) -> None:
    before = first_release.read_bytes()
    found = overview(first_release)
    assert found["problems"] == []
    assert found["steps"] == {"live": 1, "committed": 1, "dropped": 1}
    assert [(s["from_step"], s["returned"], s["first_step"], s["last_step"]) for s in found["starts"]] == [
        (None, 0, 1, 2),
        (1, 1, None, None),
    ]
    assert found["evaluations"] == [{"dataset": "eval", "points": 1, "skipped": 0, "best": 0.5}]
    assert {event["kind"]: event["times"] for event in found["happenings"]} == {"engine": 1, "trainer": 1}
    told = why(first_release, "g000000").splitlines()
    assert told[0] == "Group g000000 of prompt p-g000000 was trained in step 1."
    assert any("step 1 is committed by checkpoint step-000001" in line for line in told)
    assert any("attempt 0 took 1.0 s" in line and "OSError: the engine is gone" in line for line in told)
    assert "its prompt runs again as g000004\n" in why(first_release, "g000001")
    assert first_release.read_bytes() == before


def test_a_run_of_the_first_release_goes_on(first_release: Path) -> None:
    ledger = Ledger.open(first_release)
    assert ledger.start(1, limits=Limits(max_staleness=2, credits=8, retries=1)) == 2
    assert [(group.id, group.is_admitted, group.attempt) for group in ledger.open_groups()] == [
        ("g000002", True, 0),
        ("g000003", False, 4),
        ("g000004", False, 4),
    ]
    assert (ledger.next_group(), ledger.drawn(), ledger.last_commit()) == (5, 4, 1)
    assert ledger.scores() == {1: 0.5}
    train(ledger, 2, "g000002")
    ledger.commit(2, "step-000002")
    assert ledger.verify() == []
    ledger.close()
