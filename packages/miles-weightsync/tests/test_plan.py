"""Boxes, buckets and shards: pure planning."""

from __future__ import annotations

import math
import random

import pytest
import torch
from miles_weightsync import Shard, ShardError
from miles_weightsync.buckets import load_order, make_buckets
from miles_weightsync.layout import Box, ShardSpec, check_cover, overlaps, volume
from miles_weightsync.shard import collect


def spec(name: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> ShardSpec:
    return ShardSpec(name, shape, dtype, box)


def random_tiling(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Cut a tensor at random places, box by box."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(rng.randrange(6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        start, stop = box[dim]
        cut = rng.randint(start, stop)
        for span in ((start, cut), (cut, stop)):
            boxes.append((*box[:dim], span, *box[dim + 1 :]))
    return [box for box in boxes if volume(box)]


@pytest.mark.parametrize("seed", range(30))
def test_any_tiling_is_accepted_and_any_defect_is_found(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    tiles = list(enumerate(random_tiling(shape, rng)))
    check_cover("w", shape, tiles)
    removed = rng.choice(tiles)
    with pytest.raises(
        ShardError, match=rf"`w` .* cover {math.prod(shape) - volume(removed[1])} of {math.prod(shape)}"
    ):
        check_cover("w", shape, [tile for tile in tiles if tile is not removed])
    extra = tuple((rng.randrange(n), n) for n in shape)
    if all(extra != box for _, box in tiles):
        with pytest.raises(ShardError, match="overlap"):
            check_cover("w", shape, [*tiles, (9, extra)])


def test_boxes_overlap_only_when_they_share_an_element() -> None:
    assert not overlaps(((0, 2), (0, 4)), ((2, 4), (0, 4)))
    assert overlaps(((0, 3), (0, 4)), ((2, 4), (3, 4)))


def test_parts_of_a_fused_parameter_follow_one_another_and_layers_go_up() -> None:
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (10, 2) for p in "vqko"]
    ordered = sorted(names, key=load_order)
    assert [name.split(".")[2] for name in ordered] == ["2"] * 4 + ["10"] * 4
    assert [name.split(".")[4][0] for name in ordered[:4]] == ["o", "q", "k", "v"]


def test_buckets_close_before_they_grow_too_large_and_a_giant_gets_its_own() -> None:
    sizes = {"a": 10, "b": 10, "c": 100, "d": 10}
    specs = [spec(name, (n,), ((0, n),)) for name, n in sizes.items()]
    buckets = make_buckets([specs], bucket_bytes=120)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["a", "b"], ["c"], ["d"]]
    assert [slot.start for slot in buckets[0].slots] == [0, 64]
    assert buckets[1].nbytes == 400


def test_the_rank_with_the_fewest_bytes_sends_what_several_hold() -> None:
    whole = ((0, 8),)
    specs = [spec(f"w{i}", (8,), whole) for i in range(6)]
    pieces = [slot.pieces[0].rank for slot in make_buckets([specs, specs, specs], bucket_bytes=10**6)[0].slots]
    assert sorted(pieces) == [0, 0, 1, 1, 2, 2]


def test_without_gaps_a_file_never_starts_a_tensor_off_its_element_size() -> None:
    specs = [spec("a", (3,), ((0, 3),), "int8"), spec("b", (2,), ((0, 2),)), spec("c", (2,), ((0, 2),))]
    buckets = make_buckets([specs], bucket_bytes=10**6, align=1)
    assert [[(slot.name, slot.start) for slot in bucket.slots] for bucket in buckets] == [
        [("a", 0)],
        [("b", 0), ("c", 8)],
    ]


def test_only_floating_point_tensors_are_sent_in_another_type() -> None:
    specs = [spec("a", (2,), ((0, 2),)), spec("b", (2,), ((0, 2),), "int32")]
    (bucket,) = make_buckets([specs], bucket_bytes=100, dtype="bfloat16")
    assert [slot.dtype for slot in bucket.slots] == ["bfloat16", "int32"]


def test_ranks_that_disagree_on_a_tensor_are_named() -> None:
    with pytest.raises(ShardError, match=r"`a`: rank 0 says float32 \(2,\), rank 1 says bfloat16 \(2,\)"):
        make_buckets([[spec("a", (2,), ((0, 1),))], [spec("a", (2,), ((1, 2),), "bfloat16")]], bucket_bytes=100)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (Shard("a", (4,), torch.float32, ((0, 5),), torch.zeros(5)), r"`a`: box \[0:5\] leaves the tensor \(4,\)"),
        (Shard("a", (4,), torch.float32, ((0, 4), (0, 1)), torch.zeros(4)), "has 2 dimensions"),
        (Shard("a", (4,), torch.float32, ((0, 4),), torch.zeros(3)), r"shape \(3,\) but its box \[0:4\] spans \(4,\)"),
        (Shard("a", (4,), "bfloat16", ((0, 4),), torch.zeros(4)), "block is float32 but the shard says bfloat16"),
    ],
)
def test_a_shard_that_contradicts_its_block_is_refused(shard: Shard, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        collect([shard])


def test_empty_blocks_are_dropped_and_scalars_are_whole() -> None:
    empty = Shard("a", (4, 2), torch.float32, ((4, 4), (0, 2)), torch.zeros(0, 2))
    scalar = Shard("b", (), torch.float32, (), torch.zeros(()))
    assert [held.name for held in collect([empty, scalar])] == ["b"]
    assert make_buckets([list(collect([scalar]))], bucket_bytes=8)[0].nbytes == 4
