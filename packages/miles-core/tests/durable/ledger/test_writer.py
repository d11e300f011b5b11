"""What the ledger keeps of a run, what it refuses, and where a run goes on."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_life import event, finish, issue, make_ref, reopen, train, with_failed_attempts
from miles_core.durable.ledger import Ledger, LedgerError, Limits
from miles_core.durable.ledger.schema import connect, connect_readonly
from miles_core.durable.spool import SpoolAddress
from miles_rollout.fates import Fate
from miles_rollout.policies import MASKED_EPISODES


def rows(ledger: Ledger, sql: str) -> list[tuple]:
    """What another process sees."""
    ledger.flush()
    db = sqlite3.connect(ledger._path)  # pyright: ignore[reportPrivateUsage]
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def test_every_fate_is_counted_and_the_sum_holds(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2", "g3", "g4", "g5")
    finish(ledger, "g0", "g5")
    for name, fate in (("g1", Fate.FILTERED), ("g2", Fate.STALE), ("g3", Fate.FAILED)):
        ledger.finished(make_ref(name))
        ledger(event(name, fate, reason="because"))
    ledger(event("g4", Fate.ABORTED, reason="its worker was lost"))
    train(ledger, 1, "g0")
    counts = ledger.counts()
    assert (counts.issued, counts.trained, counts.filtered, counts.stale) == (6, 1, 1, 1)
    assert (counts.failed, counts.aborted, counts.in_flight, counts.lost) == (1, 1, 1, 0)
    assert ledger.verify() == []


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.IN_FLIGHT])
def test_a_group_has_one_final_fate(ledger: Ledger, fate: Fate) -> None:
    issue(ledger, "g0")
    finish(ledger, "g0")
    train(ledger, 1, "g0")
    with pytest.raises(LedgerError, match=f"'g0' is already trained and cannot become {fate}"):
        ledger(event("g0", fate, version=1))
    with pytest.raises(LedgerError, match="never issued"):
        ledger(event("g7", fate))
    assert ledger.counts().trained == 1
    assert ledger.verify() == []


def test_a_group_is_issued_once_and_finishes_once(ledger: Ledger) -> None:
    issue(ledger, "g0")
    with pytest.raises(LedgerError, match="'g0' was issued before"):
        issue(ledger, "g0")
    ledger.finished(make_ref("g0"))
    with pytest.raises(LedgerError, match="'g0' has finished before"):
        ledger.finished(make_ref("g0"))
    assert ledger.counts().issued == 1


def test_a_group_is_in_one_step_only(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1")
    finish(ledger, "g0", "g1")
    train(ledger, 1, "g0")
    with pytest.raises(LedgerError, match="'g0' was trained in step 1 and cannot enter step 2"):
        ledger.step(2, [make_ref("g1"), make_ref("g0")])
    assert rows(ledger, "SELECT version FROM steps") == [(1,)]


def test_groups_of_dropped_steps_return_and_the_rest_stays(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2", "g3", "g4", drawn=7)
    finish(ledger, "g0", "g1", "g2", "g4")
    train(ledger, 1, "g0")
    ledger.commit(1, "step-000001")
    train(ledger, 2, "g1", "g2")
    again = reopen(ledger)
    assert again.start(1) == 1
    assert again.rewind(1) == 2, "right after the start it only answers"
    assert [(g.id, g.is_admitted) for g in again.open_groups()] == [
        ("g1", True),
        ("g2", True),
        ("g3", False),
        ("g4", True),
    ]
    assert again.counts().trained == 1
    assert (again.drawn(), again.next_group()) == (7, 5)
    train(again, 2, "g2", "g4")
    train(again, 3, "g1")
    assert again.verify() == []
    versions = "SELECT version, dropped_start, committed_at IS NOT NULL FROM steps ORDER BY step"
    assert rows(again, versions) == [(1, None, 1), (2, 1, 0), (2, None, 0), (3, None, 0)]
    again.close()


def test_what_ran_is_issued_again_above_every_attempt_that_was_made(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", version=0)
    finish(ledger, "g1")
    again = reopen(ledger)
    again.start(0, limits=Limits(retries=3))
    first, second = again.open_groups()
    assert (first.id, first.attempt, first.issued_version) == ("g0", 2, 0), "0, and 1 that its worker may have made"
    assert (second.id, second.attempt, second.is_admitted) == ("g1", 0, True)
    again = reopen(again)
    again.start(0)
    assert again.open_groups()[0].attempt == 6
    again.finished(make_ref("g0", attempt=6))
    assert again.open_groups()[0].address is not None
    again.close()


def test_versions_of_a_dead_branch_are_mirrored(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2", "g3", version=0)
    finish(ledger, "g0", "g1")
    train(ledger, 1, "g0")
    train(ledger, 2, "g1")
    finish(ledger, "g2", oldest=1, newest=2)
    ledger(event("g4", Fate.IN_FLIGHT, version=2))
    finish(ledger, "g4", oldest=2)
    ledger.rewind(1)
    by_id = {group.id: group for group in ledger.open_groups()}
    assert by_id["g2"].versions(1, 2) == (0, 1)
    assert (by_id["g4"].versions(2, 2), by_id["g4"].issued_version) == ((0, 0), 0)
    assert by_id["g4"].versions(1, 2) == (0, 1)
    assert by_id["g4"].versions(None, None) is None
    assert (by_id["g1"].versions(0, 0), by_id["g3"].issued_version) == ((0, 0), 1)


def test_retries_that_were_not_issued_yet_are_remembered(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2")
    for name in ("g0", "g1", "g2"):
        ledger.finished(make_ref(name))
        ledger(event(name, Fate.STALE, reason="stale", will_retry=name != "g1"))
    assert ledger.pending_retries() == [("g0", "p-g0"), ("g2", "p-g2")]
    issue(ledger, "g3", retry_of="g0")
    again = reopen(ledger)
    assert [retry.retry_of for retry in again.pending_retries()] == ["g2"]
    again.start(0)
    assert rows(again, "SELECT retry_of FROM groups WHERE group_id = 'g3'") == [("g0",)]
    again.close()


def test_episodes_attempts_and_places_are_kept(ledger: Ledger) -> None:
    issue(ledger, "g0")
    ref = make_ref("g0", rewards=(1.0, None), place=("worker-1.003.spool", 77))
    ledger.finished(with_failed_attempts(ref, "OSError: one", "OSError: two"))
    assert ledger.open_groups()[0].address == SpoolAddress(file="worker-1.003.spool", offset=77)
    assert rows(ledger, "SELECT episode_id, outcome, reward, attempt, loss_tokens FROM episodes") == [
        ("g0/0", "graded", 1.0, 2, 6),
        ("g0/1", "infra_abort", None, 0, 0),
    ]
    assert rows(ledger, "SELECT attempt, error FROM attempts") == [(0, "OSError: one"), (1, "OSError: two")]


def test_a_masked_episode_may_be_older_than_the_limit(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2", "g3", "g4")
    finish(ledger, "g0", "g1", "g2", "g3", "g4")
    for version, name in enumerate(("g0", "g1", "g2"), start=1):
        train(ledger, version, name)
    assert ledger.verify() == []
    old = make_ref("g3")
    ledger(event("g3", Fate.TRAINED, version=4))
    ledger.step(4, [replace(old, metadata={MASKED_EPISODES: ("g3/0", "g3/1")})], facts={"time/train": 2.0})
    assert ledger.verify() == []
    train(ledger, 5, "g4")
    assert ledger.verify() == ["1 trained too old: g4 was 4 versions old (limit 2)."]
    with pytest.raises(LedgerError, match=r"contradicts itself:\n- 1 trained too old"):
        ledger.require_sound()


def test_the_end_of_a_run_aborts_what_is_open(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2")
    finish(ledger, "g1")
    train(ledger, 1, "g1")
    assert ledger.abort_open("run ended") == 2
    assert ledger.open_groups() == []
    assert ledger.counts().aborted == 2
    assert ledger.verify() == []


def test_a_checkpoint_commits_its_step_and_those_before(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1", "g2")
    finish(ledger, "g0", "g1", "g2")
    ledger.commit(0, "step-000000")
    for version in (1, 2, 3):
        train(ledger, version, f"g{version - 1}")
    ledger.sync()
    ledger.commit(2, "step-000002")
    committed = "SELECT version, committed_at IS NOT NULL, checkpoint FROM steps"
    assert rows(ledger, committed) == [(1, 1, None), (2, 1, "step-000002"), (3, 0, None)]
    assert ledger.last_commit() == 2
    with pytest.raises(LedgerError, match="of step 4, which this ledger does not hold: its newest step is 3"):
        ledger.commit(4, "step-000004")
    assert ledger.verify() == []


def test_a_step_that_a_run_goes_on_from_is_committed_even_if_the_ledger_was_not_told(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1")
    finish(ledger, "g0", "g1")
    train(ledger, 1, "g0")
    train(ledger, 2, "g1")
    again = reopen(ledger)
    again.start(1)
    assert rows(again, "SELECT version, committed_at IS NOT NULL FROM steps") == [(1, 1), (2, 0)]
    again.close()


def test_a_run_goes_on_only_from_what_the_ledger_knows(ledger: Ledger) -> None:
    issue(ledger, "g0")
    with pytest.raises(LedgerError, match=r"go on from step 3, but .* ends at step 0"):
        ledger.rewind(3)
    again = reopen(ledger)
    with pytest.raises(LedgerError, match="belongs to a run that began before"):
        again.start(None)
    with pytest.raises(LedgerError, match="before `start`"):
        issue(again, "g1")
    again.close()


def test_a_step_of_an_earlier_start_takes_no_more_groups(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1")
    finish(ledger, "g0", "g1")
    train(ledger, 1, "g0")
    again = reopen(ledger)
    again.start(1)
    late = event("g1", Fate.TRAINED, version=1)
    with pytest.raises(LedgerError, match="Step 1 was trained in start 0"):
        again(late)
    again.close()


def test_credits_are_counted_at_each_issue(ledger: Ledger) -> None:
    issue(ledger, *(f"g{n}" for n in range(8)))
    assert ledger.verify() == []
    issue(ledger, "g8")
    assert ledger.verify() == ["With group g8 9 groups were open, more than the 8 credits."]


def test_groups_that_a_rewind_returns_may_exceed_the_credits_until_more_are_issued(ledger: Ledger) -> None:
    names = [f"g{n}" for n in range(8)]
    issue(ledger, *names)
    finish(ledger, *names)
    train(ledger, 1, *names)
    issue(ledger, *(f"h{n}" for n in range(8)), version=1)
    ledger.rewind(0)
    assert len(ledger.open_groups()) == 16
    assert ledger.verify() == []
    issue(ledger, "h8")
    assert ledger.verify() == ["With group h8 17 groups were open, more than the 8 credits."]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            "UPDATE groups SET fate = 'stale' WHERE number = 0",
            "1 group with another fate than the last change",
        ),
        (
            "DELETE FROM changes WHERE what = 'issued' AND number = 1",
            "1 groups were issued, but 2 are known: 1 are lost",
        ),
        (
            "DELETE FROM step_groups",
            "1 group trained but in no step that survives",
        ),
        ("UPDATE steps SET version = 2", "Steps 1 are missing before step 2"),
        ("UPDATE groups SET fate = 'eaten' WHERE number = 1", "1 of 2 groups have a fate that does not exist"),
        ("UPDATE groups SET finished_at = NULL", "1 group trained without a recorded result: g0."),
        (
            "INSERT INTO changes SELECT 99, number, 'stale', '', 1, 0, 0 FROM groups WHERE number = 0",
            "1 group with two final fates: g0.",
        ),
    ],
)
def test_verify_names_what_does_not_hold(ledger: Ledger, damage: str, sentence: str) -> None:
    issue(ledger, "g0", "g1")
    finish(ledger, "g0")
    train(ledger, 1, "g0")
    ledger.flush()
    with sqlite3.connect(ledger._path) as db:  # pyright: ignore[reportPrivateUsage]
        db.execute(damage)
    db.close()
    assert any(sentence in line for line in ledger.verify()), ledger.verify()


async def test_events_of_one_tick_share_a_transaction(ledger: Ledger) -> None:
    issue(ledger, "g0", "g1")
    db = sqlite3.connect(ledger._path)  # pyright: ignore[reportPrivateUsage]
    count = "SELECT count(*) FROM groups"
    assert db.execute(count).fetchone() == (0,)
    await asyncio.sleep(0)
    assert db.execute(count).fetchone() == (2,)
    db.close()


async def test_closing_in_the_tick_of_the_last_event_keeps_it(ledger: Ledger) -> None:
    issue(ledger, "g0")
    ledger.close()
    await asyncio.sleep(0)
    again = Ledger.open(ledger._path)  # pyright: ignore[reportPrivateUsage]
    assert again.counts().issued == 1
    again.close()


async def test_a_failed_write_ends_everything_that_follows_and_wakes_whoever_watches(ledger: Ledger) -> None:
    watching = asyncio.create_task(ledger.watch())
    issue(ledger, "g0")
    await asyncio.sleep(0)
    db = ledger._db  # pyright: ignore[reportPrivateUsage]
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")  # the disk is full

    async def fill() -> None:
        for n in range(1, 1000):
            issue(ledger, f"g{n}")
            ledger(event(f"g{n}", Fate.ABORTED))
            await asyncio.sleep(0)

    with pytest.raises(LedgerError, match="database or disk is full"):
        await fill()
    with pytest.raises(LedgerError, match="can be resumed"):
        await watching
    with pytest.raises(LedgerError, match="full"):
        finish(ledger, "g0")
    ledger.close()
    again = Ledger.open(ledger._path)  # pyright: ignore[reportPrivateUsage]
    assert [g.id for g in again.open_groups()][:1] == ["g0"]
    again.start(0)
    assert again.verify() == []
    again.close()


def test_a_ledger_that_is_not_there_is_not_made_by_opening(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no ledger at"):
        Ledger.open(tmp_path / "ledger.db")


def test_scores_are_those_of_weights_that_the_run_stands_on(ledger: Ledger) -> None:
    def evaluated(version: int, **by_dataset: float | None) -> None:
        for dataset, score in by_dataset.items():
            ledger.evaluated(dataset, version=version, logged_version=version, score=score, reason="")

    for version in (1, 2, 3):
        train(ledger, version=version)
    ledger.commit(2, "step-000002")
    evaluated(0, easy=1.0, hard=0.5)
    evaluated(2, easy=1.0, hard=None)
    ledger.evaluated("*", version=3, logged_version=3, score=None, reason="timed out")
    evaluated(3, easy=0.8, hard=0.4)
    assert ledger.scores() == {0: 0.75, 2: None, 3: pytest.approx(0.6)}
    ledger.rewind(2)
    assert ledger.scores() == {0: 0.75, 2: None}, "step 3 is gone"
    evaluated(2, easy=0.5, hard=0.3)
    assert ledger.scores() == {0: 0.75, 2: pytest.approx(0.4)}


def test_happenings_and_evaluations_are_kept(ledger: Ledger) -> None:
    ledger.event("engine", "rollout-1", "died: exit status -9", version=4)
    ledger.evaluated("heldout", version=0, logged_version=1, score=0.5, seconds=3.0, metrics={"pass@2": 0.7})
    ledger.evaluated("heldout", version=2, logged_version=2, score=None, reason="the engine was gone")
    assert rows(ledger, "SELECT kind, subject, text, version FROM happenings") == [
        ("engine", "rollout-1", "died: exit status -9", 4)
    ]
    assert rows(ledger, "SELECT dataset, version, score, reason FROM evaluations") == [
        ("heldout", 0, 0.5, ""),
        ("heldout", 2, None, "the engine was gone"),
    ]


@pytest.mark.parametrize("connect", [connect, connect_readonly])
def test_a_pipe_or_a_folder_in_place_of_a_ledger_is_refused_at_once(
    tmp_path: Path, connect: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(LedgerError, match="is no file"):
            connect(tmp_path / name)
