"""Run directories belong to the run that made them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from miles_core import cli
from miles_core.durable import rundir
from miles_core.durable.rundir import RunDirError


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


def test_a_run_is_opened_with_what_it_was_created_with(tmp_path: Path) -> None:
    made = rundir.create(tmp_path, "toy", config={"seed": 1}, kind="sft", import_paths=["/home/me/task"])
    assert made.lock is not None
    made.lock.release()
    run = rundir.open_run(tmp_path / "toy")
    assert run.path == made.path
    assert run.facts() == rundir.Facts(kind="sft", import_paths=("/home/me/task",))
    rundir.write_config(run, {"seed": 2})
    assert json.loads((run.path / "config.json").read_text()) == {"seed": 2}
    assert not list(run.path.glob("*.partial"))


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"is no run: it has no config.json"):
        rundir.open_run(tmp_path)


def test_facts_that_cannot_be_read_are_an_error_with_the_file(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "toy", config={})
    for content in (
        b"{",
        b"",
        b"\xff",
        b"[]",
        b'{"kind": "dpo", "import_paths": []}',
        b'{"kind": "rl", "import_paths": "a"}',
    ):
        (run.path / "run.json").write_bytes(content)
        with pytest.raises(RunDirError, match=r"run\.json cannot be read"):
            run.facts()


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1]", b"3"])
def test_a_damaged_configuration_ends_a_resume_with_the_file(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rundir.create(tmp_path, "toy", config={})
    assert made.lock is not None
    made.lock.release()
    (made.path / "config.json").write_bytes(content)
    assert cli.main(["resume", str(made.path), "--more", "1"]) == cli.FAILED
    assert f"{made.path / 'config.json'} cannot be read" in capsys.readouterr().err
    assert (made.path / "config.json").read_bytes() == content


@pytest.mark.parametrize("words", [["--more", "1"], ["--steps", "9"]])
def test_two_words_about_the_last_step_are_refused(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model": {"path": "/models/toy"}, "env": {"target": "task:env"}}
    made = rundir.create(tmp_path, "toy", config=config)
    assert made.lock is not None
    made.lock.release()
    assert cli.main(["resume", str(made.path), *words, "--run.steps", "12"]) != 0
    told = capsys.readouterr().err
    assert " ".join(words) in told
    assert "`run.steps`" in told
    assert "say one of them" in told


def test_two_processes_never_run_in_one_directory(tmp_path: Path) -> None:
    """The one that holds it is named; when it is killed, the next one takes over at once."""
    made = rundir.create(tmp_path, "toy", config={})
    assert made.lock is not None
    made.lock.release()
    code = "import sys, pathlib; from miles_core.durable import rundir; "
    code += "run = rundir.open_run(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(made.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(RunDirError) as caught:
                rundir.open_run(made.path)
            assert f"process {other.pid} on {socket.gethostname()}, since 20" in str(caught.value)
            assert "Stop that one first" in str(caught.value)
        finally:
            os.kill(other.pid, signal.SIGKILL)
    run = rundir.open_run(made.path)
    assert json.loads((run.path / "run.lock").read_text())["pid"] == os.getpid()
