"""What a stopped run left, as buffer and producer need it to go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from core_records import make_group
from miles_core.durable.ledger import Ledger
from miles_core.durable.spool import SpoolWriter, fetch_groups
from miles_core.run.resume_state import ResumeDataError, resume_state
from miles_rollout.fates import Fate, FateEvent
from miles_tito.records import Prompt
from miles_tito.records.summary import summarize

PROMPTS = [Prompt(id=f"p-g{i}") for i in range(6)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.db", create=True)
    ledger.start(None)
    yield ledger
    ledger.close()


def event(ledger: Ledger, group: str, fate: Fate, version: int = 0, **fields: object) -> None:
    ledger(FateEvent(group_id=group, prompt_id=f"p-{group}", fate=fate, reason="", version=version, **fields))  # pyright: ignore[reportArgumentType]


def finish(ledger: Ledger, spool: SpoolWriter, group: str, *, version: int) -> None:
    record = make_group(group, [[6], [8]], version=version)
    address = spool.append(record)
    ref = summarize(record)
    ledger.finished(replace(ref, metadata={"spool": (address.file, address.offset)}))


def test_every_kind_of_open_group_comes_back_as_what_it_was(ledger: Ledger, tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "trajectories", "worker-0")
    for drawn, group in enumerate(("g0", "g1", "g2", "g3"), start=1):
        event(ledger, group, Fate.IN_FLIGHT, drawn=drawn)
    finish(ledger, spool, "g0", version=0)
    event(ledger, "g0", Fate.BUFFERED)
    finish(ledger, spool, "g1", version=0)
    finish(ledger, spool, "g3", version=0)
    event(ledger, "g3", Fate.STALE, will_retry=True)
    spool.close()
    ledger.rewind(0)
    resume = resume_state(ledger, trajectories=tmp_path / "trajectories", prompts=PROMPTS)
    admitted, spooled, running = resume.groups
    assert (admitted.id, admitted.is_admitted, admitted.prompt) == ("g0", True, PROMPTS[0])
    assert (spooled.id, spooled.is_admitted) == ("g1", False)
    assert (running.id, running.ref) == ("g2", None)
    assert running.attempt > 0, "its first attempt may still be known to a session server"
    assert [(retry.retry_of, retry.prompt) for retry in resume.retries] == [("g3", PROMPTS[3])]
    assert (resume.counts.issued, resume.counts.in_flight, resume.counts.stale, resume.next_group) == (4, 3, 1, 4)
    assert admitted.ref is not None
    (group,) = fetch_groups([admitted.ref.handle], get=lambda refs: refs, lost=())
    assert [e.id for e in group.episodes] == ["g0/0", "g0/1"], "what it trains on lies in the spool"


def test_tokens_of_steps_that_were_lost_are_as_old_as_they_are_far(ledger: Ledger, tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path / "trajectories", "worker-0")
    for group, version in (("g0", 1), ("g1", 3)):
        event(ledger, group, Fate.IN_FLIGHT)
        finish(ledger, spool, group, version=version)
        event(ledger, group, Fate.BUFFERED)
    for step in (1, 2, 3):
        event(ledger, f"g{step + 1}", Fate.IN_FLIGHT, version=step - 1)
        event(ledger, f"g{step + 1}", Fate.TRAINED, version=step)
    spool.close()
    ledger.commit(2, "step-000002")
    ledger.rewind(2)
    resume = resume_state(ledger, trajectories=tmp_path / "trajectories", prompts=PROMPTS)
    versions = {group.id: group.ref.oldest_version for group in resume.groups if group.ref is not None}
    assert versions == {"g0": 1, "g1": 1}, "step 3 lies one step beyond 2, on a branch that is no more"


def test_a_prompt_that_the_data_no_longer_has_is_named(ledger: Ledger, tmp_path: Path) -> None:
    event(ledger, "g9", Fate.IN_FLIGHT)
    with pytest.raises(ResumeDataError, match=r"'p-g9' was issued and is not finished.*6 prompts"):
        resume_state(ledger, trajectories=tmp_path, prompts=PROMPTS)
