"""Checkpoints are complete or absent, the newest is found by number, and a full disk keeps the last good one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from miles_core.durable import checkpoints as module
from miles_core.durable.checkpoints import Checkpoints, reading
from miles_train.errors import CheckpointError


class Killed(BaseException):
    """The process ends here: nothing that would clean up runs."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def save(checkpoints: Checkpoints, step: int, *, payload: str = "weights", **state: object) -> Path:
    trainer = checkpoints.begin(step) / "trainer"
    trainer.mkdir()
    (trainer / "rank-0.safetensors").write_text(payload)
    return checkpoints.complete(step, {"version": step, **state})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_found_and_read_back(folder):
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() is None
    path = save(checkpoints, 12, drawn=340)
    assert path.name == "step-000012"
    assert names(path) == sorted(["COMPLETE", "state.json", "trainer"])
    found = Checkpoints(folder).latest()
    assert found is not None
    assert found.step == 12
    assert checkpoints.load_state(found) == {"step": 12, "version": 12, "drawn": 340}


def test_the_latest_is_the_one_with_the_highest_number(folder):
    """Fault D12, with names that sort otherwise as text and folders of other kinds beside them."""
    checkpoints = Checkpoints(folder, keep=10)
    for step in (9, 100, 10):
        save(checkpoints, step)
    for junk in ("step-999x", "final", "sft", "step-", "Step-000200", "step-000300.mine"):
        (folder / junk).mkdir()
    (folder / "step-000400").write_text("a file")
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 100
    save(checkpoints, 1_000_000)
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 1_000_000, "more digits than the usual name has"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("marker", "it has no COMPLETE"),
        ("torn marker", "its COMPLETE cannot be read"),
        ("weights", "it has no trainer/rank-0.safetensors"),
        ("short weights", "trainer/rank-0.safetensors has 6 bytes of 7"),
        ("state", "it has no state.json"),
        ("partial", "a process died while it was written"),
    ],
)
def test_an_incomplete_one_is_passed_over_aloud(folder, caplog, damage, reason):
    """Fault D10."""
    checkpoints = Checkpoints(folder)
    save(checkpoints, 5)
    newest = save(checkpoints, 10)
    weights = newest / "trainer" / "rank-0.safetensors"
    match damage:
        case "marker":
            (newest / "COMPLETE").unlink()
        case "torn marker":
            os.truncate(newest / "COMPLETE", 9)
        case "weights":
            weights.unlink()
        case "short weights":
            os.truncate(weights, 6)
        case "state":
            (newest / "state.json").unlink()
        case "partial":
            newest.rename(folder / "step-000010.partial")
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 5
    assert "step-000010" in caplog.text
    assert reason in caplog.text
    assert "using step-000005" in caplog.text
    save(checkpoints, 10)
    again = checkpoints.latest()
    assert again is not None
    assert again.step == 10, "the step is saved again when it is done again"


def test_older_incomplete_ones_are_nobodys_business(folder, caplog):
    checkpoints = Checkpoints(folder)
    (save(checkpoints, 5) / "COMPLETE").unlink()
    save(checkpoints, 10)
    assert checkpoints.latest()
    assert not caplog.records


class Mortal:
    """Ends the process at the n-th operation on the disk; a write gets as far as `half` bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, *, at: int, half: int = 0) -> None:
        self.count = 0
        self._at = at
        self._half = half
        write = module._write
        self._guard(patch, module.os, "fsync")
        self._guard(patch, module.Path, "rename")
        self._guard(patch, module.shutil, "rmtree")

        def dying(path: Path, value: object) -> None:
            if self._is_next():
                text = json.dumps(value, indent=2) + "\n"
                path.write_text(text[: self._half])
                raise Killed
            write(path, value)  # pyright: ignore[reportArgumentType]

        patch.setattr(module, "_write", dying)

    def _guard(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        act = getattr(owner, name)

        def guarded(*args: object, **options: object) -> object:
            if self._is_next():
                raise Killed
            return act(*args, **options)

        patch.setattr(owner, name, guarded)

    def _is_next(self) -> bool:
        self.count += 1
        return self.count == self._at


def test_a_kill_at_any_operation_leaves_the_last_one_and_nothing_to_trip_over(folder, monkeypatch):
    """Fault D11. The second save replaces the only other one (keep = 1), the hardest case."""
    at = 0
    while True:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        save(Checkpoints(folder, keep=1), 5, payload="old")
        with monkeypatch.context() as patch:
            Mortal(patch, at=at)
            try:
                save(Checkpoints(folder, keep=1), 10, payload="new")
                break
            except Killed:
                pass
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.clean()
        found = checkpoints.latest()
        assert found is not None, f"operation {at} lost everything"
        expected = {5: "old", 10: "new"}[found.step]
        assert (found.path / "trainer" / "rank-0.safetensors").read_text() == expected
        assert checkpoints.load_state(found)["version"] == found.step
        assert all(name.startswith("step-") and "." not in name for name in names(folder)), "left-overs are removed"
        save(checkpoints, 15)
        assert names(folder) == ["step-000015"], "and the run goes on"
    assert at > 12, "every write, sync, rename and removal was tried"


@pytest.mark.parametrize("file", ["state.json", "COMPLETE"])
def test_a_kill_at_any_byte_of_the_small_files_is_no_checkpoint(folder, monkeypatch, file):
    """Fault D11. The ranks' own files are cut at any byte in the tests of miles-train."""
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: None)  # a thousand of them take long
    checkpoints = Checkpoints(folder)
    save(checkpoints, 5)
    size = (folder / "step-000005" / file).stat().st_size
    for half in range(size + 1):
        with monkeypatch.context() as patch:
            write = module._write

            def dying(path: Path, value: object, half: int = half, write=write) -> None:
                if path.name != file:
                    return write(path, value)
                path.write_text((json.dumps(value, indent=2) + "\n")[:half])
                raise Killed

            patch.setattr(module, "_write", dying)
            with pytest.raises(Killed):
                save(checkpoints, 10)
        found = Checkpoints(folder).latest()
        assert found is not None
        assert found.step == 5


def test_only_the_newest_are_kept_and_those_of_round_numbers(folder):
    checkpoints = Checkpoints(folder, keep=2, keep_every=100)
    for step in range(0, 351, 50):
        save(checkpoints, step)
    assert [c.step for c in checkpoints.scan()[0]] == [100, 200, 300, 350]


def test_one_that_somebody_reads_stays_until_they_are_done(folder):
    checkpoints = Checkpoints(folder, keep=1)
    path = save(checkpoints, 1)
    with reading(path), reading(path):
        save(checkpoints, 2)
        assert (path / "trainer" / "rank-0.safetensors").read_text() == "weights"
        save(checkpoints, 3)
        assert names(folder) == ["step-000001", "step-000003"]
    save(checkpoints, 4)
    assert names(folder) == ["step-000004"]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint at .*step-000001 any more"), reading(path):
        pass


def test_a_step_is_not_saved_twice(folder):
    checkpoints = Checkpoints(folder)
    save(checkpoints, 3)
    with pytest.raises(CheckpointError, match="step 3 cannot be saved twice"):
        checkpoints.begin(3)


def test_only_left_overs_are_cleaned_up(folder, caplog):
    checkpoints = Checkpoints(folder)
    save(checkpoints, 1)
    for name in ("step-000002.partial", "step-000003.pruned", "step-000004.mine", "final"):
        (folder / name).mkdir()
    assert [path.name for path in checkpoints.clean()] == ["step-000002.partial", "step-000003.pruned"]
    assert names(folder) == ["final", "step-000001", "step-000004.mine"]
    assert "removed step-000002.partial" in caplog.text


def test_a_request_counts_once(folder):
    checkpoints = Checkpoints(folder)
    assert not checkpoints.take_request()
    folder.parent.mkdir()
    (folder.parent / "save_now").touch()
    assert checkpoints.take_request()
    assert not checkpoints.take_request()


def test_a_disk_too_small_for_another_one_is_told_before_anything_is_written(folder, monkeypatch):
    class Usage:
        free = 10

    checkpoints = Checkpoints(folder, keep=3)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda path: Usage)
        with pytest.raises(CheckpointError, match=r"full: for the checkpoint of step 2 about \d\d\d bytes are needed"):
            checkpoints.begin(2)
    assert names(folder) == ["step-000001"]
    save(checkpoints, 2)


@pytest.mark.parametrize("file", ["state.json", "COMPLETE"])
def test_a_disk_that_fills_up_keeps_the_last_good_one_and_leaves_no_part_of_the_new(folder, monkeypatch, file):
    checkpoints = Checkpoints(folder, keep=1)
    save(checkpoints, 1)
    write = module._write

    def full(path: Path, value: object) -> None:
        if path.name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, value)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", full)
        with pytest.raises(CheckpointError) as caught:
            save(checkpoints, 2)
    message = str(caught.value)
    assert "it takes over" in message
    assert "are free without it" in message
    assert "step-000001 stays the newest complete one" in message
    assert "lower checkpoint.keep (1), then resume" in message
    assert names(folder) == ["step-000001"]


def test_a_state_of_a_newer_miles_is_refused(folder):
    checkpoints = Checkpoints(folder)
    path = save(checkpoints, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 7}))
    found = module.Checkpoint(1, path)
    with pytest.raises(CheckpointError, match="has format 7; this version of Miles reads format 1"):
        checkpoints.load_state(found)


def test_one_that_was_given_the_name_of_another_step_is_passed_over(folder, caplog):
    """Its weights would go on with groups that another step trained."""
    checkpoints = Checkpoints(folder)
    save(checkpoints, 2)
    save(checkpoints, 4)
    (folder / "step-000002").rename(folder / "step-000006")
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 4
    assert "step-000006 is passed over: its COMPLETE is of step 2" in caplog.text
