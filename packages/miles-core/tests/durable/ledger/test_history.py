"""`miles why` and `miles ledger`: what they tell, and from which beginnings of ids."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_life import event, finish, issue, make_ref, train, with_failed_attempts
from miles_core import cli
from miles_core.durable.ledger import Ledger, LedgerError, Limits, overview, query, why
from miles_rollout.fates import Fate

ledger_overview = importlib.import_module(
    "miles_core.durable.ledger.overview"
)  # the package exports its function of that name
NIGHT = time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two starts: g0 was trained twice, the first time in a step that a crash undid; g1 became stale, g4 repeats it."""
    now = iter(range(1000))
    path = tmp_path / "ledger.db"
    ledger = Ledger.open(path, create=True, clock=lambda: NIGHT + next(now))
    ledger.start(0, limits=Limits(credits=8, retries=1))
    issue(ledger, "g0", "g1", "g2", "g3")
    ref = make_ref("g0", rewards=(1.0, None), place=("worker-1.002.spool", 77))
    ledger.finished(with_failed_attempts(ref, "OSError: the engine\nis gone"))
    ledger(event("g0", Fate.BUFFERED))
    train(ledger, 1, "g0")
    finish(ledger, "g1")
    ledger(event("g1", Fate.STALE, reason="stale", version=1, will_retry=True))
    issue(ledger, "g4", retry_of="g1")
    ledger.finished(make_ref("g2", rewards=(1.0, 1.0)))
    ledger(event("g2", Fate.FILTERED, reason="no_spread"))
    ledger.close()
    ledger = Ledger.open(path, clock=lambda: NIGHT + next(now))
    ledger.start(0)
    train(ledger, 1, "g0")
    ledger.commit(1, "step-000001")
    ledger.close()
    return tmp_path


def told(run: Path, name: str) -> list[str]:
    return why(run / "ledger.db", name).splitlines()


def test_a_group_is_told_across_restarts_with_times_versions_and_place(run: Path) -> None:
    headline, *lines = told(run, "g0")
    assert headline == "Group g0 of prompt p-g0 was trained in step 1."
    assert lines[0].startswith("  2026-03-04 05:06:0")
    events = [line[23:] for line in lines if line.startswith("  2026")]
    assert events == [
        "issued while the engines held version 0",
        "finished: 1 of 2 episodes have a reward, sampled by version 0, on disk in trajectories/worker-1.002.spool at "
        "byte 77",
        "admitted to the buffer at version 0",
        "trained: the engines hold version 1, which contains it",
        "the run went back to step 0 and dropped the step that had trained it: it waits in the buffer again",
        "trained: the engines hold version 1, which contains it",
        "step 1 is committed by checkpoint step-000001: no crash can undo it",
    ]


def test_episodes_come_with_their_attempts_errors_and_rewards(run: Path) -> None:
    lines = told(run, "g0/0")
    assert lines[0] == "Episode g0/0 is one of the siblings of group g0."
    assert "  g0/0  graded, reward 1, 10 tokens (6 trained) in 1 trajectories, sampled by version 0" in lines
    assert any("attempt 0 took 1.0 s until" in line and "infra_abort, OSError: the engine" in line for line in lines)
    assert any("attempt 1 took 2.0 s" in line for line in lines)
    assert not any("g0/1 " in line for line in lines)
    assert any("g0/1  infra_abort, ConnectionError: the sandbox is gone" in line for line in told(run, "g0"))


def test_a_sample_is_found_by_the_id_of_its_trajectory(run: Path) -> None:
    assert told(run, "g0-1.0:0")[0] == "Sample g0-1.0:0 is a trajectory of episode g0/1."
    with pytest.raises(LedgerError, match="Group g0 has 2 episodes, 0 to 1"):
        told(run, "g0/2")


def test_a_retry_is_told_from_both_ends(run: Path) -> None:
    old = told(run, "g1")
    assert old[0] == "Group g1 of prompt p-g1 was discarded for its age (stale)."
    assert any(line.endswith("its prompt runs again as g4") for line in old)
    new = told(run, "g4")
    assert new[0] == "Group g4 of prompt p-g4 runs, or waits to be run again by the next start."
    assert any("because g1 was discarded" in line for line in new)
    assert any("the run went on from step 0 and issued it again" in line for line in new)


def test_a_prompt_shows_each_of_its_groups(run: Path) -> None:
    ledger = Ledger.open(run / "ledger.db")
    ledger.start(1)
    for number in range(25):
        ledger(replace(event(f"h{number}", Fate.IN_FLIGHT, version=1), prompt_id="p-g2"))
    lines = told(run, "p-g2")
    ledger.close()
    assert lines[0] == "Prompt p-g2 was issued 26 times."
    assert lines[1].endswith("h24 runs, or waits to be run again by the next start")
    assert lines[-1] == "  … and 6 earlier ones"
    assert told(run, "p-g0")[:2] == ["Prompt p-g0 was issued once.", "Group g0 of prompt p-g0 was trained in step 1."]


def test_the_beginning_of_an_id_is_enough_where_it_is_the_only_one(run: Path) -> None:
    assert told(run, "p-g3")[0] == told(run, "p-g3"[:4])[0]
    with pytest.raises(LedgerError, match=r"'g' begins several ids: g0, g1, g2, g3, g4\. Give more of it"):
        told(run, "g")
    with pytest.raises(LedgerError, match=r"called 'x', or begins so\. Groups go from g0 to g4"):
        told(run, "x")
    with pytest.raises(LedgerError, match="begins several"):
        told(run, "")


def test_text_of_others_cannot_move_the_cursor(run: Path) -> None:
    ledger = Ledger.open(run / "ledger.db")
    ledger.start(1)
    ledger(replace(event("h0", Fate.IN_FLIGHT), prompt_id="evil\x1b[2J"))
    ledger(replace(event("h0", Fate.FILTERED, reason="\x1b]0;\x07"), prompt_id="evil\x1b[2J"))
    ledger.close()
    assert "\x1b" not in "".join(told(run, "h0"))
    assert cli.main(["ledger", str(run)]) == 0


def test_a_query_reads_and_changes_nothing(run: Path) -> None:
    path = run / "ledger.db"
    assert query(path, "SELECT fate, count(*) AS n FROM groups GROUP BY fate ORDER BY fate") == (
        ["fate", "n"],
        [("filtered", 1), ("in_flight", 2), ("stale", 1), ("trained", 1)],
    )
    before = path.read_bytes()
    for sql in (
        "DELETE FROM groups",
        "ATTACH '/tmp/x.db' AS x",
        "PRAGMA user_version = 9",
        "SELECT 1; SELECT 2",
        "SELEC",
        "SELECT '\udcff'",
    ):
        with pytest.raises(LedgerError, match="The query failed"):
            query(path, sql)
    with pytest.raises(LedgerError, match="The query is empty"):
        query(path, " ")
    assert path.read_bytes() == before


ENDLESS = "WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless) SELECT "


def test_a_query_without_an_end_is_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its time, or by its rows, before it has filled the memory."""
    monkeypatch.setattr(ledger_overview, "MAX_ROWS", 1000)
    with pytest.raises(LedgerError, match="more than 1,000 rows"):
        query(run / "ledger.db", ENDLESS + "n FROM endless")
    monkeypatch.setattr(ledger_overview, "QUERY_S", 0.05)
    with pytest.raises(LedgerError, match=r"took longer than 0\.05 s"):
        query(run / "ledger.db", ENDLESS + "count(*) FROM endless")


def test_columns_of_one_name_are_not_lost_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", str(run), "--json", "--sql", "SELECT 1 AS a, 2 AS a"]) == cli.FAILED
    assert "Two columns are called 'a'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["\udcff\udcfe", "g0/" + "9" * 5000, "g0/\u0663", "g0-" + "1" * 10])
def test_an_id_that_nothing_can_have_is_told_so(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", str(run), name]) == cli.FAILED
    assert "No prompt, group, episode or sample is called" in capsys.readouterr().err


def test_the_overview_adds_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = overview(run / "ledger.db")
    assert found["problems"] == []
    assert found["starts"][1]["returned"] == 1
    assert cli.main(["ledger", str(run)]) == 0
    text = capsys.readouterr().out
    assert "groups: 5 ≠ 1 + 1 + 1 + 0 + 0" in text
    assert "filtered   no_spread       1" in text
    assert text.rstrip().endswith("every invariant holds")
    assert cli.main(["ledger", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    assert cli.main(["ledger", str(run), "--json", "--sql", "SELECT group_id FROM groups LIMIT 1"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"group_id": "g0"}]


def test_a_ledger_that_does_not_add_up_fails_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.open(run / "ledger.db")
    ledger._db.execute("UPDATE groups SET fate = 'stale' WHERE group_id = 'g0'")  # pyright: ignore[reportPrivateUsage]
    ledger.close()
    assert cli.main(["ledger", str(run)]) == 1
    assert "does not hold:" in capsys.readouterr().out


def test_why_is_a_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", str(run), "g2"]) == 0
    assert "was discarded by the filter (no_spread)" in capsys.readouterr().out
    assert cli.main(["why", str(run / "absent"), "g2"]) == 1
    assert "There is no ledger at" in capsys.readouterr().err
