"""Run directories belong to the run that made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from miles_core import rundir
from miles_core.rundir import RunDirError


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_taken_name_gets_a_number_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first = rundir.create(tmp_path / "runs", "toy", config={"seed": 1})
    (first.path / "metrics.jsonl").write_text("mine")
    before = content(first.path)
    second = rundir.create(tmp_path / "runs", "toy", config={"seed": 2})
    third = rundir.create(tmp_path / "runs", "toy", config={"seed": 3})
    assert [run.path.name for run in (first, second, third)] == ["toy", "toy-2", "toy-3"]
    assert content(first.path) == before
    assert json.loads((second.path / "config.json").read_text()) == {"seed": 2}


def test_a_file_of_that_name_is_left_alone_too(tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("a note")
    assert rundir.create(tmp_path, "toy", config={}).path.name == "toy-2"
    assert (tmp_path / "toy").read_text() == "a note"


def test_it_says_what_ran_where(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "toy", config={})
    said = json.loads((run.path / "environment.json").read_text())
    assert said["packages"]["miles-core"]
    assert {"command", "python", "platform", "cpus"} <= set(said)
    assert all(folder.is_dir() for folder in (run.trajectories, run.checkpoints, run.log))


def test_a_place_that_cannot_be_written_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"Cannot create the run directory .*file/toy: .*Set `run.dir`"):
        rundir.create(tmp_path / "file", "toy", config={})
