"""FP8 blocks against golden bytes, an exhaustive nearest-value search, and the whole tensor cut into shards."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_quant import Fp8Format, QuantError, Recipe, quantize_shards
from miles_quant.fp8 import RULES

GOLDEN = Path(__file__).parents[4] / "shared" / "data" / "golden" / "quant.npz"
BLOCKS = {"fp8_tensor": None, "fp8_1x128": (1, 128), "fp8_128x128": (128, 128)}


class Shard(NamedTuple):
    name: str
    global_shape: tuple[int, ...]
    dtype: str
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.skipif(not GOLDEN.exists(), reason="golden vectors are not beside this checkout")
def test_codes_and_scales_equal_every_golden_byte():
    golden = np.load(GOLDEN)
    checked = 0
    for key in golden.files:
        family, *rest = key.split("|")
        if not family.startswith("fp8_") or rest[2] != "q":
            continue
        layout, rule = family.split("/")
        case, dtype, _ = rest
        raw = golden[f"input|{case}|{dtype}"]
        weight = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16) if dtype == "bf16" else torch.from_numpy(raw)
        codes, scale = Fp8Format(block=BLOCKS[layout], rule=rule).quantize(weight)
        np.testing.assert_array_equal(bits(codes), golden[key], err_msg=key)
        np.testing.assert_array_equal(scale.numpy(), golden[key[:-1] + "s"], err_msg=key)
        checked += 1
    assert checked == len([k for k in golden.files if k.startswith("fp8_") and k.endswith("|q")]) > 100


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-30, 30),
    rule=st.sampled_from(RULES),
)
def test_each_code_is_the_nearest_e4m3_value_of_the_scaled_weight(rows, columns, seed, exponent, rule):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = Fp8Format(block=(8, 16), rule=rule).quantize(weight)
    table = np.unique(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0.0).numpy())
    spread = np.kron(scale.double().numpy(), np.ones((8, 16)))[:rows, :columns]
    scaled = np.clip(weight.double().numpy() / spread, -448, 448)
    nearest = np.abs(scaled[..., None] - table).min(-1)
    error = np.abs(scaled - codes.double().numpy())
    # The spec scales in float32: allow that rounding, nothing more.
    assert (error <= nearest + np.abs(scaled) * 2**-22).all()


@pytest.mark.parametrize("rule", RULES)
def test_fake_quantisation_is_what_the_engine_computes_from_the_stored_bytes(rule):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    format = Fp8Format(block=(32, 32), rule=rule)
    codes, scale = format.quantize(weight)
    engine = codes.double() * torch.kron(scale, torch.ones(32, 32)).double()
    torch.testing.assert_close(format.fake_quantize(weight), engine.float(), rtol=1e-7, atol=0)
    assert (engine - weight).abs().max() <= 2.0**-4 * weight.abs().max()  # half a step of three mantissa bits


def test_a_block_of_zeros_stays_zero_without_nan():
    for rule in RULES:
        codes, scale = Fp8Format(rule=rule).quantize(torch.zeros(130, 5))
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()
        assert codes.float().abs().max() == 0


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(1, 7), max_size=4), seed=st.integers(0, 1000))
def test_shards_quantise_to_the_same_bytes_as_the_whole_tensor(cuts, seed):
    weight = torch.randn(61, 40, generator=torch.Generator().manual_seed(seed))
    format = Fp8Format(block=(8, 16))
    edges = sorted({0, 61, *(8 * c for c in cuts)})
    name = "model.layers.0.mlp.up_proj.weight"
    shards = [Shard(name, (61, 40), "float32", ((a, b), (0, 40)), weight[a:b]) for a, b in itertools.pairwise(edges)]
    packed = list(quantize_shards(shards, Recipe(format=format)))
    whole = format.quantize(weight)
    codes = torch.cat([bits_tensor(p.tensor) for p in packed if p.name == name])
    scales = torch.cat([p.tensor for p in packed if p.name.endswith("weight_scale_inv")])
    assert torch.equal(codes, bits_tensor(whole.codes))
    assert torch.equal(scales, whole.scale)


def bits_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_box_that_cuts_a_block_is_refused_with_the_aligned_one():
    shard = Shard("model.layers.0.mlp.up_proj.weight", (64, 64), "float32", ((0, 20), (0, 64)), torch.ones(20, 64))
    with pytest.raises(QuantError, match=r"nearest aligned box is \(\(0, 32\), \(0, 64\)\)"):
        list(quantize_shards([shard], Recipe(format=Fp8Format(block=(16, 16)))))


def test_nan_is_refused_with_its_place():
    weight = torch.zeros(4, 4)
    weight[2, 3] = float("nan")
    with pytest.raises(QuantError, match=r"1 of 16 values .* \[2, 3\]"):
        Fp8Format().quantize(weight)


def test_the_recipe_keeps_norms_embeddings_head_router_and_the_chosen_layers():
    recipe = Recipe(format=Fp8Format(), keep=("q_proj",), keep_first_layers=1, keep_last_layers=1, num_layers=4)
    yes = "model.layers.1.mlp.up_proj.weight"
    no = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    assert recipe.quantizes(yes, (128, 128))
    assert not [name for name in no if recipe.quantizes(name, (128, 128))]


def test_last_layers_without_their_number_are_refused():
    with pytest.raises(QuantError, match="num_layers"):
        Recipe(format=Fp8Format(), keep_last_layers=2)
