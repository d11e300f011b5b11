"""Breaking the contract on purpose: the comparison of bytes sees every one, however small its effect on the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from miles_quant import Recipe, compare, convert, differing, get_format, load_packed, prepare_model, quantize_shards
from miles_quant import with_digests as digesting
from miles_quant.export.digest import Digest

from .conftest import bits, normal
from .tiny_models import build, empty_like, export, logits, save, token_ids

RULES = [
    ("mxfp8/rceil", "mxfp8/floor"),
    ("fp8_128x128/te", "fp8_128x128/te_pow2"),
    ("fp8_128x128/div", "fp8_128x128/miles"),
    ("nvfp4/te", "nvfp4/te_4o6_MSE"),
    ("nvfp4/te_4o6_MSE", "nvfp4/te_4o6_MAE"),
    ("nvfp4/te", "nvfp4/modelopt"),
    ("int4_g32/miles", "int4_g32/ct"),
]


@pytest.mark.parametrize(("here", "there"), RULES)
def test_another_rule_on_one_side_is_seen(here: str, there: str, tmp_path: Path):
    folder = save(build("dense"), tmp_path / "plain")
    for side, format in (("here", here), ("there", there)):
        convert(folder, tmp_path / side, Recipe(format=format, only=()), is_quiet=True)
    rows = [row for row in compare(tmp_path / "here", tmp_path / "there") if row.codes_equal is not None]
    assert len(rows) == 14
    assert [row.name for row in rows if not row.is_equal]


def test_another_group_size_is_seen_as_another_shape_of_the_scales():
    weight = normal(64, 256)
    wide, narrow = get_format("int4_g128/miles").quantize(weight), get_format("int4_g32/miles").quantize(weight)
    assert wide.scale.shape != narrow.scale.shape
    assert not torch.equal(wide.codes, narrow.codes)


def test_training_against_the_unrounded_scale_of_int4_is_another_number():
    weight, format = normal(64, 256), get_format("int4_g32/miles")
    quantized = format.quantize(weight)
    exact = format.scale_before_rounding(weight).repeat_interleave(32, 1)
    stored = quantized.scale.float().repeat_interleave(32, 1)
    codes = format.dequantize(quantized, dtype=torch.float32) / stored
    differs = (codes * exact).bfloat16() != format.dequantize(quantized)
    assert 0.01 < float(differs.double().mean()) < 0.9


def test_a_shared_expert_quantised_on_one_side_alone_is_seen(tmp_path: Path):
    model = build("moe")
    folder = save(model, tmp_path / "plain")
    convert(folder, tmp_path / "all", Recipe(format="fp8"), is_quiet=True)
    convert(folder, tmp_path / "part", Recipe(format="fp8", keep_bf16=(".layers.1.mlp.experts.",)), is_quiet=True)
    seen = [row for row in compare(tmp_path / "all", tmp_path / "part") if not row.is_equal]
    assert len(seen) == 4 * 3
    assert all(row.codes_equal is None and ".layers.1.mlp.experts." in row.name for row in seen)


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "int4"])
def test_one_flipped_bit_of_one_code_is_seen_by_the_receiver(format: str):
    recipe = Recipe(format=format, only=())
    model = build("dense")
    stored, digests = export(model, recipe), digests_of(model, recipe)
    assert differing(digests, stored) == []
    name = next(n for n in stored if n.endswith(("up_proj.weight", "up_proj.weight_packed")))
    broken = stored[name].clone()
    bits(broken)[17] ^= 1
    assert differing(digests, {**stored, name: broken}) == [name]


def digests_of(model: torch.nn.Module, recipe: Recipe) -> list[Digest]:
    from miles_quant.nn.prepare import named_matrices

    from .conftest import Shard

    shards = [
        Shard(name, (*matrix.shape,), "bfloat16", tuple((0, n) for n in matrix.shape), matrix.detach())
        for name, matrix in named_matrices(model).items()
    ]
    digests: list[Digest] = []
    list(digesting(quantize_shards(lambda: shards, recipe), digests))
    return digests


def keep_activations(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "scheme"):
            scheme = module.scheme
            module.scheme = type(scheme)(weight=scheme.weight, activation=None, source_dtype=scheme.source_dtype)


def scale_activations_by_batch(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "scheme"):
            scheme = module.scheme
            module.scheme = type(scheme)(
                weight=scheme.weight, activation=get_format("nvfp4/te"), source_dtype=scheme.source_dtype
            )


@pytest.mark.parametrize(
    ("format", "change"),
    [("fp8", keep_activations), ("mxfp8", keep_activations), ("nvfp4", scale_activations_by_batch)],
)
def test_other_activations_on_one_side_change_the_logits(
    format: str, change: Callable[[torch.nn.Module], None], tmp_path: Path
):
    model, recipe, ids = build("dense"), Recipe(format=format, only=()), token_ids(2, 24)
    convert(save(model, tmp_path / "plain"), tmp_path / "packed", recipe, is_quiet=True)
    engine = load_packed(empty_like(model), tmp_path / "packed")
    prepare_model(model, recipe)
    assert torch.equal(logits(model, ids), logits(engine, ids))
    change(engine)
    assert not torch.equal(logits(model, ids), logits(engine, ids))
