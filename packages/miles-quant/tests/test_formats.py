"""What holds for every format: nearest codes, exact way back, defined edges, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_quant import QuantError, get_format, swizzle_scales, unswizzle_scales
from miles_quant.formats.numbers import E2M1_VALUES
from miles_quant.formats.spec import QuantizedTensor

from .conftest import FORMATS, bits, normal

E4M3_TABLE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0.0).unique()
E2M1_TABLE = torch.tensor(E2M1_VALUES, dtype=torch.float64).unique()


def unit_of_error(name: str, quantized: QuantizedTensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale behind every element, and the values that a code can have."""
    format = get_format(name)
    scale = quantized.scale.double()
    if format.name.family in ("mxfp8", "mxfp4"):
        scale = torch.exp2(scale - 127)
    if quantized.global_scale is not None:
        scale = scale * quantized.global_scale.double().reshape(-1, 1)
    rows, columns = (b or n for b, n in zip(format.block, shape, strict=True))
    spread = torch.kron(scale, torch.ones(rows, columns, dtype=torch.float64))[: shape[0], : shape[1]]
    match format.name.family:
        case "fp8" | "mxfp8":
            return spread, E4M3_TABLE
        case "int4":
            return spread, torch.arange(-8, 8, dtype=torch.float64)
        case _:
            return spread, E2M1_TABLE


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from([name for name in FORMATS if not name.startswith("int4")]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-20, 20),
)
def test_each_code_is_the_nearest_value_of_the_scaled_weight(name, rows, columns, seed, exponent):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    format = get_format(name)
    quantized = format.quantize(weight)
    scale, table = unit_of_error(name, quantized, (rows, columns))
    scaled = (weight.double() / scale).clamp(table.min(), table.max())
    code = format.dequantize(quantized, dtype=torch.float32).double() / scale
    nearest = (scaled[..., None] - table).abs().amin(-1)
    # Scaling rounds in float32 (and the way back once more): allow that, nothing else.
    assert ((scaled - code).abs() <= nearest + scaled.abs() * 2**-21 + 1e-30).all()


@pytest.mark.parametrize("name", ["fp8_128x128/te_pow2", "mxfp8/rceil", "mxfp8/floor", "mxfp4/even"])
def test_with_powers_of_two_as_scales_quantising_again_changes_no_value(name: str):
    format = get_format(name)
    once = format.fake_quantize(normal(64, 256, dtype=torch.float32))
    assert torch.equal(format.fake_quantize(once), once)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (130, 129), (2, 400)])
def test_shapes_that_no_block_divides_are_padded_and_come_back_in_their_shape(name: str, shape: tuple[int, int]):
    format = get_format(name)
    weight = normal(*shape)
    quantized = format.quantize(weight)
    assert format.fake_quantize(weight).shape == shape
    padded = torch.nn.functional.pad(weight, (0, -shape[1] % 128, 0, -shape[0] % 128))
    if 0 not in format.block:
        whole = format.quantize(padded)
        rows, columns = quantized.scale.shape
        assert torch.equal(bits(whole.scale[:rows, :columns]), bits(quantized.scale))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zero_without_nan(name: str, dtype: torch.dtype):
    format = get_format(name)
    assert format.fake_quantize(torch.zeros(130, 256, dtype=dtype)).abs().max() == 0
    mixed = normal(130, 256, dtype=dtype)
    mixed[:128, :128] = 0
    assert torch.isfinite(format.fake_quantize(mixed)).all()
    assert format.fake_quantize(mixed)[:128, :128].abs().max() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_nan_reaches_all_that_shares_its_scale_and_nothing_else(name: str):
    format = get_format(name)
    weight = normal(256, 256, dtype=torch.float32)
    clean = format.fake_quantize(weight)
    weight[3, 5] = float("nan")
    broken = format.fake_quantize(weight)
    assert broken[3, 5].isnan()
    rows, columns = (b or n for b, n in zip(format.block, weight.shape, strict=True))
    if name.startswith("nvfp4/te_row"):
        columns = 256
    elif format.name.has_tensor_scale:
        rows = columns = 256
    outside = torch.ones_like(weight, dtype=torch.bool)
    outside[:rows, :columns] = False
    if rows == 1:
        outside[3, :columns] = False
        outside[0, :] = True
    assert torch.equal(broken[outside], clean[outside])


@pytest.mark.parametrize("rule", ["te", "te_row", "te_4o6_MAE", "modelopt"])
def test_one_huge_value_does_not_overflow_nvfp4(rule: str):
    weight = torch.full((1, 16), torch.finfo(torch.float32).max)
    assert torch.isfinite(get_format(f"nvfp4/{rule}").fake_quantize(weight)).all()


def test_a_result_does_not_depend_on_the_other_rows_where_tokens_have_their_own_scale():
    for name in ("fp8_1x128/div", "fp8_row/div", "mxfp8/rceil", "nvfp4/te_row", "nvfp4/te_row_4o6_MSE"):
        format, tokens = get_format(name), normal(8, 256)
        alone = torch.cat([format.fake_quantize(tokens[i : i + 1]) for i in range(8)])
        assert torch.equal(format.fake_quantize(tokens), alone), name
    assert not torch.equal(
        get_format("nvfp4/te").fake_quantize(normal(8, 256)),
        torch.cat([get_format("nvfp4/te").fake_quantize(normal(8, 256)[i : i + 1]) for i in range(8)]),
    )


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("nvfp4/te_row",)])
def test_stored_tensors_restore_to_the_same_bytes(name: str):
    format = get_format(name)
    weight = normal(32, 256)
    quantized = format.quantize(weight)
    stored = format.store(quantized)
    for part in format.parts:
        assert stored[part.suffix].dtype == part.dtype
        assert tuple(stored[part.suffix].shape) == part.shape_of((32, 256))
    restored = format.restore(stored)
    assert torch.equal(
        format.dequantize(restored, dtype=torch.float32), format.dequantize(quantized, dtype=torch.float32)
    )
    missing = dict(list(stored.items())[:-1])
    with pytest.raises(QuantError, match="are not there"):
        format.restore(missing)


def test_a_shape_that_compressed_tensors_wrote_as_int64_is_read_too():
    format = get_format("int4_g32/miles")
    stored = format.store(format.quantize(normal(32, 256)))
    read = format.restore({**stored, "weight_shape": stored["weight_shape"].long()})
    assert read.shape == (32, 256)


@pytest.mark.parametrize("name", ["fp8_tensor/te", "nvfp4/te", "nvfp4/te_4o6_MAE", "nvfp4/modelopt"])
def test_a_shared_maximum_takes_the_place_of_the_matrix_own(name: str):
    format = get_format(name)
    whole = normal(64, 256)
    amax = format.amax(whole)
    parts = [format.quantize(part, amax=amax) for part in whole.split(16)]
    assert torch.equal(torch.cat([bits(p.codes) for p in parts]), bits(format.quantize(whole).codes))
    with pytest.raises(QuantError, match="below the largest absolute value"):
        format.quantize(whole, amax=amax / 2)


def test_a_maximum_is_refused_where_the_format_has_no_place_for_it():
    with pytest.raises(QuantError, match="no scale of the whole"):
        get_format("mxfp8").quantize(normal(4, 64), amax=torch.tensor(1.0))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(4), "floating matrices"),
        (torch.zeros(2, 2, 2), "floating matrices"),
        (torch.zeros(2, 2, dtype=torch.int32), "floating matrices"),
        (torch.zeros(0, 4), "nothing to quantise"),
    ],
)
def test_what_is_no_matrix_is_refused(weight: torch.Tensor, words: str):
    with pytest.raises(QuantError, match=words):
        get_format("fp8").quantize(weight)


def test_scales_of_another_shape_or_type_are_refused_with_the_expected_one():
    format = get_format("fp8_128x128/div")
    stored = format.store(format.quantize(normal(256, 256)))
    with pytest.raises(QuantError, match=r"\(1, 2\) for a matrix \(256, 256\) .* expected \(2, 2\)"):
        format.restore({**stored, "weight_scale_inv": stored["weight_scale_inv"][:1]})
    with pytest.raises(QuantError, match=r"stores it as torch\.float32"):
        format.restore({**stored, "weight_scale_inv": stored["weight_scale_inv"].to(torch.bfloat16)})


@pytest.mark.parametrize(
    "name", ["fp9", "fp8_128x128", "fp8_0x128/div", "mxfp8/ceil", "nvfp4/fast", "int4_g33/miles", "int4_g32/te", ""]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str):
    with pytest.raises(QuantError, match="Short names: fp8, mxfp8, mxfp4, nvfp4, nvfp4_4o6, int4"):
        get_format(name)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 300), columns=st.integers(1, 20), seed=st.integers(0, 100))
def test_the_interleave_of_scales_follows_its_formula_and_is_undone(rows, columns, seed):
    scales = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    swizzled = swizzle_scales(scales).numpy()
    width = -(-columns // 4)
    r, c = np.mgrid[0:rows, 0:columns]
    where = ((r // 128) * width + c // 4) * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + c % 4
    np.testing.assert_array_equal(swizzled[where], scales.numpy())
    assert torch.equal(unswizzle_scales(torch.from_numpy(swizzled), (rows, columns)), scales)
