"""Two trainer ranks on gloo, in processes of their own, against one engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from weightsync_fakes import weights

SCRIPT = Path(__file__).with_name("weightsync_rank.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"rank{rank}.json" for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), "2", str(folder / "store"), str(out)])
        for rank, out in enumerate(outs)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 9]
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.parametrize("scenario", ["own_boxes", "ranks_of_another_host", "folder"])
def test_each_rank_contributes_its_own_boxes(seen: list[dict[str, Any]], scenario: str) -> None:
    nbytes = sum(tensor.nbytes for tensor in weights(1).values())
    for rank in (0, 1):
        for push in seen[rank][scenario]["pushes"]:
            assert push == {"error": None, "bytes": nbytes, "ok": [True]}
    assert seen[0][scenario]["arrived"]
    assert seen[0][scenario]["left"] == []


def test_an_engine_that_fails_is_reported_to_every_rank_and_recovered_by_the_next_push(
    seen: list[dict[str, Any]],
) -> None:
    first, second = zip(*(seen[rank]["engine_fails"]["pushes"] for rank in (0, 1)), strict=True)
    assert first[0]["error"] == "SyncError"
    assert "scripted failure" in first[0]["message"]
    assert first[0] == first[1]
    assert seen[0]["engine_fails"]["paused"]
    assert [push["error"] for push in second] == [None, None]
    assert seen[0]["engine_fails"]["arrived"]
    assert not seen[0]["engine_fails"]["mixed"]


def test_a_rank_that_fails_is_named_on_every_rank_and_no_engine_was_paused(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        first, second = seen[rank]["a_rank_fails"]["pushes"]
        assert first["error"] == "SyncError"
        assert "rank 1: OSError: the optimizer state is gone" in first["message"]
        assert second["error"] is None
    assert not seen[0]["a_rank_fails"]["paused"]
    assert seen[0]["a_rank_fails"]["arrived"]


def test_overlapping_boxes_are_told_with_ranks_and_boxes_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        (push,) = seen[rank]["boxes_overlap"]["pushes"]
        assert push["error"] == "ShardError"
        assert "box [0:3] of rank 0 and box [2:4] of rank 1 overlap" in push["message"]


def test_ranks_must_agree_on_the_version(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        (push,) = seen[rank]["versions_differ"]["pushes"]
        assert push["error"] == "SyncError"
        assert "different versions: [7, 8]" in push["message"]


def test_ranks_must_agree_on_the_settings(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        (made,) = seen[rank]["settings_differ"]["pushes"]
        assert made["error"] == "PushConfigError"
        assert "`way` is ['tensor', 'staged']" in made["message"]


def test_a_rank_that_dies_ends_the_push_of_the_others(seen: list[dict[str, Any]]) -> None:
    (push,) = seen[0]["a_rank_dies"]["pushes"]
    assert push["error"] == "SyncError"
    assert "lost the other 1 trainer ranks" in push["message"]
    assert seen[0]["a_rank_dies"]["left"] == []
