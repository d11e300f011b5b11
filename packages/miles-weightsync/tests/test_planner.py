"""The copy planner over random layouts: minimal, exact, deterministic, balanced, and clear about what is missing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import miles_weightsync
import numpy as np
import pytest
from miles_weightsync import ShardError
from miles_weightsync.layout import Box, ShardSpec, volume
from miles_weightsync.planner import Layout, make_plan
from planner_models import numbered, run, same, scatter

DTYPES = ["bfloat16", "float32", "float8_e4m3fn"]


def random_tiling(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(rng.randrange(6) if shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        cut = rng.randint(start, stop)
        boxes += [(*box[:dim], span, *box[dim + 1 :]) for span in ((start, cut), (cut, stop))]
    return [box for box in boxes if volume(box)]


def random_sides(rng: random.Random) -> tuple[Layout, Layout]:
    """Random tensors of 0 to 3 dimensions; replicas on both sides; engines may leave parts out."""
    sources, targets = rng.randint(1, 6), rng.randint(1, 6)
    held: list[tuple[int, ShardSpec]] = []
    wanted: list[tuple[int, ShardSpec]] = []
    for index in range(rng.randint(1, 8)):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice(DTYPES)
        for box in random_tiling(shape, rng):
            for rank in rng.sample(range(sources), rng.randint(1, sources)):
                held.append((rank, ShardSpec(f"w{index}", shape, dtype, box)))
        for rank in range(targets):
            boxes = random_tiling(shape, rng)
            for box in rng.sample(boxes, rng.randint(0, len(boxes))):
                wanted.append((rank, ShardSpec(f"w{index}", shape, dtype, box)))
    hosts = {rank: f"t{rank % 2}" for rank in range(sources)}
    return Layout.from_shards(hosts, held), Layout.from_shards({r: "e" for r in range(targets)}, wanted)


def sides(held: list[tuple[int, Box]], wanted: list[tuple[int, Box]], shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    def layout(boxes: list[tuple[int, Box]]) -> Layout:
        shards = [(rank, ShardSpec("w", shape, "bfloat16", box)) for rank, box in boxes]
        return Layout.from_shards({rank: "h" for rank, _ in boxes}, shards)

    return layout(held), layout(wanted)


@pytest.mark.parametrize("seed", range(100))
def test_every_needed_element_moves_exactly_once_and_nothing_else_does(seed: int) -> None:
    source, target = random_sides(random.Random(seed))
    plan = make_plan(source, target)
    needed = sum(
        volume(spec.box) * {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[spec.dtype] for _, spec in target.shards()
    )
    assert plan.bytes_moved == plan.bytes_needed == needed == sum(copy.nbytes for copy in plan.copies)
    tensors = numbered(source)
    arrived = run(plan, scatter(source, tensors), target)
    assert same(arrived, scatter(target, {name: tensors[name] for name in target.tensors}))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_in_which_ranks_report_does_not_change_who_sends(seed: int) -> None:
    source, target = random_sides(random.Random(seed))
    reported = list(source.shards())
    random.Random(seed + 1).shuffle(reported)
    again = Layout.from_shards(source.hosts, reported)
    assert make_plan(again, target).copies == make_plan(source, target).copies


def uncovered(source: Layout, target: Layout) -> set[str]:
    """Tensors of which the target needs an element that no source rank holds, element by element."""
    masks = {name: np.zeros(tensor.shape, dtype=bool) for name, tensor in target.tensors.items()}
    for _, spec in source.shards():
        if spec.name in masks:
            masks[spec.name][tuple(slice(*span) for span in spec.box)] = True
    needed = {(spec.name, spec.box) for _, spec in target.shards()}
    return {name for name, box in needed if not masks[name][tuple(slice(*span) for span in box)].all()}


@pytest.mark.parametrize("seed", range(40))
def test_when_a_rank_leaves_the_others_send_all_or_a_lost_tensor_is_named(seed: int) -> None:
    rng = random.Random(seed)
    source, target = random_sides(rng)
    gone = rng.choice(sorted(source.hosts))
    left = source.without({gone})
    if lost := uncovered(left, target):
        with pytest.raises(ShardError) as raised:
            make_plan(left, target)
        assert any(f"`{name}`" in str(raised.value) for name in lost)
        return
    plan = make_plan(left, target)
    assert gone not in plan.sent
    tensors = numbered(source)
    arrived = run(plan, scatter(left, tensors), target)
    assert same(arrived, scatter(target, {name: tensors[name] for name in target.tensors}))


def test_a_target_rank_that_leaves_gets_nothing_and_the_others_what_they_had() -> None:
    source, target = random_sides(random.Random(3))
    gone = min(target.hosts)
    plan = make_plan(source, target.without({gone}))
    before = make_plan(source, target)
    assert plan.received == {rank: nbytes for rank, nbytes in before.received.items() if rank != gone}


def test_the_least_loaded_replica_sends() -> None:
    shards = [(rank, ShardSpec(f"w{i}", (8,), "bfloat16", ((0, 8),))) for i in range(30) for rank in range(3)]
    shards += [(0, ShardSpec("big", (80,), "bfloat16", ((0, 80),)))]
    source = Layout.from_shards({0: "a", 1: "a", 2: "b"}, shards)
    target = Layout.from_shards({0: "c"}, [(0, spec) for spec in dict.fromkeys(spec for _, spec in shards)])
    plan = make_plan(source, target)
    assert plan.sent == {0: 224, 1: 208, 2: 208}
    assert plan.sender_max_over_mean == pytest.approx(224 * 3 / 640)


def test_a_missing_part_is_named_with_the_rank_that_needs_it() -> None:
    source, target = sides([(0, ((0, 4), (0, 4)))], [(5, ((2, 8), (0, 4)))], (8, 4))
    with pytest.raises(ShardError, match=r"rank 5 needs \[2:8, 0:4\] but no source rank holds \[4:8, 0:4\]"):
        make_plan(source, target)


def test_a_tensor_that_nobody_holds_is_named() -> None:
    target = Layout.from_shards({0: "a"}, [(0, ShardSpec("b", (2,), "bfloat16", ((0, 2),)))])
    with pytest.raises(ShardError, match="`b` is needed by the target but no source rank holds any of it"):
        make_plan(Layout({0: "a"}, {}), target)


def test_overlap_is_refused_on_both_sides() -> None:
    source, target = sides([(0, ((0, 5),)), (1, ((4, 8),))], [(0, ((0, 8),))], (8,))
    with pytest.raises(ShardError, match=r"\[0:5\] of rank 0 and box \[4:8\] of rank 1 overlap"):
        make_plan(source, target)
    source, target = sides([(0, ((0, 8),))], [(3, ((0, 5),)), (3, ((4, 8),))], (8,))
    with pytest.raises(ShardError, match=r"rank 3 needs the overlapping boxes \[0:5\] and \[4:8\]"):
        make_plan(source, target)


def test_sides_that_disagree_on_a_tensor_are_refused() -> None:
    source = Layout.from_shards({0: "a"}, [(0, ShardSpec("w", (4,), "float32", ((0, 4),)))])
    target = Layout.from_shards({0: "a"}, [(0, ShardSpec("w", (4,), "bfloat16", ((0, 4),)))])
    with pytest.raises(ShardError, match=r"holds float32 \(4,\), the target needs bfloat16 \(4,\)"):
        make_plan(source, target)


@pytest.mark.parametrize("seed", range(10))
def test_a_layout_survives_its_file(seed: int, tmp_path: Path) -> None:
    for layout in random_sides(random.Random(seed)):
        path = tmp_path / "layout.json"
        path.write_text(json.dumps(layout.to_json()))
        read = Layout.read(path)
        assert read.hosts == layout.hosts
        assert set(read.shards()) == set(layout.shards())


def shard(**changes: object) -> dict[str, object]:
    return {"name": "w", "global_shape": [4], "dtype": "bfloat16", "box": [[0, 4]], **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the layout must be an object"),
        ({"rank": []}, r"missing \['ranks'\], unknown \['rank'\]"),
        ({"ranks": [{"rank": 0, "host": "a"}]}, r"ranks\[0\]: missing \['shards'\]"),
        ({"ranks": [{"rank": -1, "host": "a", "shards": []}]}, r"ranks\[0\].rank must be a whole number"),
        ({"ranks": [{"rank": 0, "host": "a", "shards": []}] * 2}, r"ranks\[1\]: rank 0 is listed twice"),
        ({"ranks": [{"rank": 0, "host": "a", "shards": [shard(box=[[0, 5]])]}]}, r"leaves the tensor \(4,\)"),
        ({"ranks": [{"rank": 0, "host": "a", "shards": [shard(box=[[0]])]}]}, r"needs \[start, stop\], got \[0\]"),
        ({"ranks": [{"rank": 0, "host": "a", "shards": [shard(dtype="int5")]}]}, "unknown dtype `int5`"),
        ({"ranks": [{"rank": 0, "host": "a", "shards": [shard(), shard()]}]}, r"lists the box \[0:4\] twice"),
        (
            {"ranks": [{"rank": r, "host": "a", "shards": [shard(dtype=d)]} for r, d in enumerate(DTYPES[:2])]},
            "rank 1 says float32",
        ),
    ],
)
def test_a_layout_file_that_is_wrong_is_refused_with_the_place(data: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ShardError, match=message):
        Layout.read(path)


def test_an_unknown_rank_cannot_leave() -> None:
    with pytest.raises(ShardError, match=r"Ranks \[7\] are not in the layout; it has 1 ranks"):
        Layout({0: "a"}, {}).without({7})


def test_planning_needs_the_standard_library_alone() -> None:
    code = "import sys, NAME.planner, NAME.cli; print(sorted({'torch', 'httpx', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", code.replace("NAME", miles_weightsync.__name__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
