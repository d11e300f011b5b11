"""Shared-memory segments: who owns them, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from miles_weightsync import StagingError, required_bytes, shm, shm_free_bytes
from miles_weightsync.shm import HEADER_BYTES, Segment, clean_stale
from weightsync_fakes import shm_names


def test_a_reader_sees_what_the_owner_writes_and_no_name_is_left() -> None:
    owner = Segment.create(100)
    reader = Segment.attach(owner.name, 100)
    owner.memory[HEADER_BYTES:] = bytes(range(100))
    assert reader.memory[HEADER_BYTES:] == bytes(range(100))
    link = owner.link()
    assert link in shm_names()
    owner.unlink()
    assert link not in shm_names()
    owner.link()
    reader.close()
    owner.close()
    assert owner.name not in shm_names()


def test_a_segment_that_is_forgotten_removes_its_names() -> None:
    segment = Segment.create(100)
    names = {segment.name, segment.link()}
    assert names <= set(shm_names())
    del segment
    assert not names & set(shm_names())


def test_what_a_killed_owner_leaves_is_removed_and_what_a_living_one_holds_is_kept() -> None:
    living = Segment.create(10)
    code = (
        "from miles_weightsync.shm import Segment; s = Segment.create(10); s.link(); print(s.name, flush=True); input()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    assert name in shm_names(owner.pid)
    clean_stale()
    assert name in shm_names(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.communicate()
    assert name in clean_stale()
    assert shm_names(owner.pid) == []
    assert living.name in shm_names()
    living.close()


def test_a_forked_child_that_ends_leaves_its_parents_names() -> None:
    segment = Segment.create(10)
    child = os.fork()
    if child == 0:
        segment._finalize()
        os._exit(0)
    os.waitpid(child, 0)
    assert segment.name in shm_names()
    segment.close()


def test_too_little_space_is_told_in_numbers_before_anything_is_written() -> None:
    free = shm_free_bytes()
    with pytest.raises(
        StagingError, match=rf"needs {free + 2**30 + HEADER_BYTES} bytes of /dev/shm but \d+ are free.*bucket_bytes"
    ):
        Segment.create(free + 2**30)


def test_what_does_not_fit_is_refused_without_taking_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "shm_free_bytes", lambda: 1000)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the kernel was asked"))
    with pytest.raises(StagingError, match=rf"needs {1001 + HEADER_BYTES} bytes of /dev/shm but 1000 are free"):
        Segment.create(1001)


def test_the_space_needed_is_two_buckets_unless_one_holds_the_model() -> None:
    assert required_bytes(bucket_bytes=100, model_bytes=1000) == 2 * (100 + HEADER_BYTES)
    assert required_bytes(bucket_bytes=100, model_bytes=60) == 60 + HEADER_BYTES
    assert required_bytes(bucket_bytes=100, model_bytes=1000, largest_tensor_bytes=300) == 2 * (300 + HEADER_BYTES)
