"""Shards in any layout become the bytes of the whole tensor, and digests that the receiver can check."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_quant import (  # fmt: skip
    QuantError,
    Recipe,
    check_boxes,
    differing,
    largest_over_ranks,
    quantize_shards,
    round_shards,
    with_digests,
)
from miles_quant.export.shards import PackedShard

from .conftest import Shard, bits, normal

UP, GATE = "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.0.gate_proj.weight"
FORMATS = ("fp8_tensor/te", "fp8_row/div", "fp8_1x128/miles", "fp8_16x32/div", "mxfp8", "mxfp4", "nvfp4", "nvfp4_4o6",
           "nvfp4/modelopt", "int4", "int4_g64/ct")  # fmt: skip


def whole(name: str, tensor: torch.Tensor) -> Shard:
    return Shard(name, (*tensor.shape,), "bfloat16", tuple((0, n) for n in tensor.shape), tensor)


def cut(name: str, tensor: torch.Tensor, rows: list[int], columns: list[int]) -> list[Shard]:
    """The tensor along a grid of cuts."""
    edges = [sorted({0, *cuts, size}) for cuts, size in zip((rows, columns), tensor.shape, strict=True)]
    boxes = [
        ((a, b), (c, d))
        for a, b in zip(edges[0][:-1], edges[0][1:], strict=True)
        for c, d in zip(edges[1][:-1], edges[1][1:], strict=True)
    ]
    return [
        Shard(name, (*tensor.shape,), "bfloat16", box, tensor[box[0][0] : box[0][1], box[1][0] : box[1][1]])
        for box in boxes
    ]


def assemble(packed: list[PackedShard]) -> dict[str, torch.Tensor]:
    """Stored tensors from their boxes; every element must come exactly once."""
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for shard in packed:
        if shard.name not in tensors:
            tensors[shard.name] = torch.empty(shard.global_shape, dtype=getattr(torch, shard.dtype))
        place = tensors[shard.name].view(torch.uint8) if shard.tensor.dtype.itemsize == 1 else tensors[shard.name]
        value = shard.tensor.view(torch.uint8) if shard.tensor.dtype.itemsize == 1 else shard.tensor
        place[tuple(slice(*interval) for interval in shard.box)] = value
        filled[shard.name] = filled.get(shard.name, 0) + shard.tensor.numel()
    assert filled == {name: max(tensor.numel(), 1) for name, tensor in tensors.items()}
    return tensors


def over_ranks(ranks: list[list[Shard]], recipe: Recipe) -> list[PackedShard]:
    """Every rank exports alone; `reduce_max` is answered from what all of them hold."""
    asked: list[dict[str, float]] = []

    def record(local: dict[str, float]) -> dict[str, float]:
        asked.append(local)
        return {key: 1e30 for key in local}

    for shards in ranks:
        list(quantize_shards(lambda shards=shards: shards, recipe, reduce_max=record))
    agreed = {key: max(local.get(key, 0.0) for local in asked) for key in {k for local in asked for k in local}}
    return [
        packed
        for shards in ranks
        for packed in quantize_shards(lambda shards=shards: shards, recipe, reduce_max=lambda _: agreed)
    ]


@settings(deadline=None, max_examples=30)
@given(
    format=st.sampled_from(FORMATS),
    num_ranks=st.integers(1, 4),
    cuts=st.tuples(st.lists(st.integers(1, 3), max_size=2), st.lists(st.just(1), max_size=1)),
    seed=st.integers(0, 1000),
)
def test_shards_of_any_aligned_layout_become_the_bytes_of_the_whole(format, num_ranks, cuts, seed):
    recipe = Recipe(format=format, only=())
    up, gate = normal(64, 256, seed=seed), normal(64, 256, seed=seed + 1)
    columns = [] if format.startswith("fp8_row") else [128 * cut for cut in cuts[1]]
    shards = [s for name, t in ((UP, up), (GATE, gate)) for s in cut(name, t, [16 * c for c in cuts[0]], columns)]
    ranks = [[] for _ in range(num_ranks)]
    for i, shard in enumerate(shards):
        ranks[(i * 7 + seed) % num_ranks].append(shard)

    sharded = assemble(over_ranks(ranks, recipe))
    unsharded = assemble(list(quantize_shards(lambda: [whole(UP, up), whole(GATE, gate)], recipe)))
    assert sharded.keys() == unsharded.keys()
    for name, tensor in unsharded.items():
        assert torch.equal(bits(sharded[name]), bits(tensor)), name


def test_gate_and_up_share_one_maximum_and_others_do_not():
    recipe = Recipe(format="nvfp4")
    down = UP.replace("up_proj", "down_proj")
    tensors = {UP: normal(32, 64), GATE: normal(32, 64, seed=1) * 3, down: normal(64, 32, seed=2)}
    stored = assemble(list(quantize_shards(lambda: [whole(n, t) for n, t in tensors.items()], recipe)))
    scales = {name: stored[name.removesuffix("weight") + "weight_scale_2"] for name in tensors}
    assert scales[UP] == scales[GATE]
    assert scales[UP] != scales[down]
    expected = recipe.spec.quantize(tensors[UP], amax=recipe.spec.amax(tensors[GATE]))
    assert torch.equal(stored[UP], expected.codes)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "int4"])
def test_rounded_shards_hold_the_values_of_the_packed_ones_under_the_plain_names(format: str):
    recipe, tensor = Recipe(format=format, only=()), normal(64, 128)
    norm = whole("model.norm.weight", normal(64))
    shards = [norm, whole(UP, tensor)]
    rounded = list(round_shards(lambda: shards, recipe))
    assert [shard[:4] for shard in rounded] == [shard[:4] for shard in shards]
    assert rounded[0].tensor is norm.tensor
    assert torch.equal(rounded[1].tensor, recipe.spec.fake_quantize(tensor))


def test_what_the_recipe_keeps_passes_through_untouched():
    norm = whole("model.norm.weight", normal(64))
    (passed,) = quantize_shards(lambda: [norm], Recipe(format="mxfp8"))
    assert tuple(passed) == tuple(norm)
    assert passed.tensor is norm.tensor


@pytest.mark.parametrize(
    ("format", "box", "aligned"),
    [
        ("fp8_16x16/div", ((0, 20), (0, 64)), r"\(\(0, 32\), \(0, 64\)\)"),
        ("mxfp8", ((0, 20), (16, 64)), r"\(\(0, 20\), \(0, 64\)\)"),
        ("fp8_row/div", ((0, 20), (0, 32)), r"\(\(0, 20\), \(0, 64\)\)"),
        ("int4", ((3, 20), (0, 24)), r"\(\(3, 20\), \(0, 32\)\)"),
    ],
)
def test_a_box_that_cuts_a_block_is_refused_with_the_aligned_one(format: str, box, aligned: str):
    tensor = torch.ones(box[0][1] - box[0][0], box[1][1] - box[1][0])
    shard = Shard("model.layers.0.mlp.up_proj.weight", (64, 64), "float32", box, tensor)
    with pytest.raises(QuantError, match=rf"nearest aligned box is {aligned}"):
        list(quantize_shards(lambda: [shard], Recipe(format=format)))
    with pytest.raises(QuantError, match=rf"nearest aligned box is {aligned}"):
        check_boxes([shard], Recipe(format=format))
    check_boxes([shard], Recipe(format=format, keep_bf16=("up_proj", "gate_proj")))


@pytest.mark.parametrize("box", [((0, 256), (0, 256)), ((-128, 0), (0, 256)), ((128, 256), (0, 256)), ((0, 128),)])
def test_a_box_that_is_not_the_one_of_its_tensor_is_refused(box):
    shard = Shard(UP, (128, 256), "bfloat16", box, normal(128, 256))
    with pytest.raises(QuantError, match=r"is not one of the tensor of shape \(128, 256\)"):
        list(quantize_shards(lambda: [shard], Recipe(format="mxfp8")))


@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor/div"])
def test_what_bfloat16_cannot_hold_and_what_is_no_float_is_refused(format: str):
    huge, counts = torch.full((128, 256), 3.4e38), torch.ones(128, 256, dtype=torch.int32)
    for tensor, words in ((huge, "NaN or Inf as bfloat16"), (counts, "is int32")):
        shard = Shard(UP, (128, 256), "float32", ((0, 128), (0, 256)), tensor)
        with pytest.raises(QuantError, match=words):
            list(quantize_shards(lambda shard=shard: [shard], Recipe(format=format), reduce_max=dict))


def test_a_cut_tensor_without_a_maximum_over_the_ranks_is_refused():
    half = cut(UP, normal(32, 64), [16], [])[0]
    with pytest.raises(QuantError, match="so pass `reduce_max`"):
        list(quantize_shards(lambda: [half], Recipe(format="nvfp4")))


def test_a_reduce_max_that_forgets_this_rank_is_refused():
    with pytest.raises(QuantError, match=r"`reduce_max` returned 0\.001 for"):
        list(quantize_shards(lambda: [whole(UP, normal(32, 64))], Recipe(format="nvfp4"),
                             reduce_max=lambda local: dict.fromkeys(local, 0.001)))  # fmt: skip


def test_a_rank_that_holds_no_row_sends_nothing():
    empty = Shard(UP, (32, 64), "bfloat16", ((32, 32), (0, 64)), torch.empty(0, 64))
    for format in ("mxfp8", "nvfp4", "fp8_16x16/div"):
        assert list(quantize_shards(lambda: [empty], Recipe(format=format, only=()), reduce_max=dict)) == []


def test_nan_is_refused_with_name_and_place():
    broken = normal(32, 64)
    broken[2, 3] = float("inf")
    for format in ("mxfp8", "nvfp4"):
        with pytest.raises(QuantError, match=rf"1 of 2048 values of {UP} .* \[2, 3\]: inf"):
            list(quantize_shards(lambda: [whole(UP, broken)], Recipe(format=format)))


def test_a_weight_that_is_broken_on_one_rank_stops_every_rank_and_leaves_none_waiting():
    top, bottom = cut(UP, normal(32, 64), [16], [])
    broken = bottom._replace(tensor=torch.full_like(bottom.tensor, torch.nan))
    asked: list[dict[str, float]] = []

    def record(local: dict[str, float]) -> dict[str, float]:
        asked.append(local)
        return {key: max(held[key] for held in asked) for key in local}

    recipe = Recipe(format="nvfp4")
    with pytest.raises(QuantError, match="1024 of 1024 values"):
        round_shards(lambda: [broken], recipe, reduce_max=record)
    with pytest.raises(QuantError, match="holds NaN or Inf on another rank"):
        round_shards(lambda: [top], recipe, reduce_max=record)
    assert len(asked) == 2, "a rank raised before it had told the others"


def test_a_process_alone_has_the_maxima_of_all_ranks():
    assert largest_over_ranks({"a": 1.5}) == {"a": 1.5}


def test_digests_accept_what_arrived_whole_and_name_what_did_not():
    recipe, tensor = Recipe(format="int4", only=()), normal(64, 256)
    digests = []
    shards = cut(UP, tensor, [16, 48], [128])
    stored = assemble(list(with_digests(quantize_shards(lambda: shards, recipe), digests)))
    assert differing(digests, stored) == []
    assert len(digests) == 6 * 2 + 1

    base = UP.removesuffix("weight")
    codes = stored[base + "weight_packed"]
    codes[17, 3] ^= 1
    assert differing(digests, stored) == [base + "weight_packed"]
    codes[17, 3] ^= 1
    scale = stored.pop(base + "weight_scale")
    assert differing(digests, stored) == [base + "weight_scale"]
    assert differing(digests, {**stored, base + "weight_scale": scale.float()}) == [base + "weight_scale"]
    assert differing(digests, {**stored, base + "weight_scale": scale[:32]}) == [base + "weight_scale"]
    assert differing(digests, {**stored, base + "weight_scale": scale.flatten()}) == [base + "weight_scale"]
