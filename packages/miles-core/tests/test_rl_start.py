"""Where a run begins: what its directory says must agree with itself before anything is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from miles_core.config import Config, to_dict
from miles_core.durable import rundir
from miles_core.durable.checkpoints import Checkpoints
from miles_core.durable.ledger import Ledger
from miles_core.monitor import JsonlMonitor
from miles_core.run import rl
from miles_core.run.changes import ResumeError
from miles_rollout.fates import Fate, FateEvent


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says when the run has got as far as to start its processes."""

    def started(*_: Any, **__: Any) -> Any:
        raise LookupError("the processes are started")

    monkeypatch.setattr(rl, "started", started)


@pytest.fixture
def left(tmp_path: Path) -> rundir.RunDir:
    """The directory of a run that has committed step 2; its checkpoint is gone."""
    run_dir = rundir.create(tmp_path, "run", config=to_dict(Config()))
    ledger = Ledger.open(run_dir.ledger, create=True)
    ledger.start(None)
    for step in (1, 2):
        for fate, version in ((Fate.IN_FLIGHT, step - 1), (Fate.TRAINED, step)):
            ledger(FateEvent(group_id=f"g{step}", prompt_id="p", fate=fate, reason="", version=version))
    ledger.commit(2, "step-000002")
    ledger.close()
    return run_dir


def begin(run_dir: rundir.RunDir, *, accept_changes: bool = False) -> None:
    monitor = JsonlMonitor(run_dir.path)
    asyncio.run(rl.RLRun(Config(), run_dir=run_dir, monitor=monitor, accept_changes=accept_changes).run())


def test_committed_steps_are_never_undone_without_a_word(left: rundir.RunDir) -> None:
    with pytest.raises(ResumeError, match=r"Step 2 is committed, but .* is of step 0: 2 committed steps.*--accept"):
        begin(left)
    with pytest.raises(LookupError, match="the processes are started"):
        begin(left, accept_changes=True)


def test_a_run_whose_checkpoint_is_there_begins(left: rundir.RunDir) -> None:
    checkpoints = Checkpoints(left.checkpoints)
    checkpoints.begin(2)
    checkpoints.complete(2, {})
    with pytest.raises(LookupError, match="the processes are started"):
        begin(left)
