"""The formats against independent implementations, and every disagreement with them as a fact of its own.

    reference               agrees                               disagrees (each asserted below)
    torch casts             E4M3 of finite values                -
    ml_dtypes               E4M3, E2M1, E8M0 values              Inf and what overflows E4M3: NaN there, 448 here
    gfloat                  E4M3 and E2M1 of finite values       -
    torchao MX              floor, even; rceil elsewhere         rceil by log2 near powers of two; exponent 0
    torchao NVFP4           torchao2, 1level                     a tensor of zeros: NaN there
    compressed-tensors      INT4 `ct`, packing                   -
    torchao three products  forward and both gradients           inputs on which its rceil is wrong
    NVIDIA ModelOpt         NVFP4 `modelopt`                     the sign of zero; a tensor of zeros: NaN there

Between the rules themselves: the last test.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_quant import get_format
from miles_quant.formats.numbers import from_e2m1, from_e8m0, to_e2m1, to_e4m3
from miles_quant.nn.matmul import Scheme, train_linear

from .conftest import bits, normal

ml_dtypes = pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes")
gfloat = pytest.importorskip("gfloat", reason="pip install gfloat")

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="scripts/quant-references.sh runs this")
SCALARS = settings(deadline=None, max_examples=40)


@st.composite
def matrices(draw: Any, columns: int = 64, *, finite: bool = True) -> torch.Tensor:
    """[2, columns] of raw float32 or bfloat16 patterns: denormals, ties, both zeros, a wide or a narrow range."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "bits", "ties", "narrow", "denormal"]))
    if kind == "bits":
        values = rng.integers(0, 2**32, (2, columns), dtype=np.uint32).view(np.float32)
    elif kind == "ties":
        values = (rng.integers(-64, 65, (2, columns)) / np.float32(8)).astype(np.float32)
    elif kind == "denormal":
        values = rng.integers(0, 2**22, (2, columns), dtype=np.uint32).view(np.float32)
    else:
        spread = 8 if kind == "normal" else 1
        values = (rng.standard_normal((2, columns)) * 2.0 ** rng.integers(-spread, spread, (2, 1))).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = -0.0
    if finite:
        values = np.nan_to_num(values, nan=1.0, posinf=3e38, neginf=-3e38)
    tensor = torch.from_numpy(values)
    return tensor.bfloat16() if draw(st.booleans()) and not (finite and kind == "bits") else tensor


@SCALARS
@given(values=matrices(finite=False))
def test_e4m3_is_that_of_ml_dtypes_gfloat_and_torch(values: torch.Tensor):
    clamped = values.float().clamp(-448, 448)
    ours = bits(to_e4m3(values.float())).numpy()
    number = ~clamped.isnan().flatten().numpy()
    assert (ours[~number] == 0x7F).all()
    np.testing.assert_array_equal(ours[number], bits(clamped.to(torch.float8_e4m3fn)).numpy()[number])
    exact = clamped.nan_to_num(0.0)
    other = exact.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8).flatten()
    np.testing.assert_array_equal(ours[number], other[number])
    from gfloat.formats import format_info_ocp_e4m3

    exact = exact.double().numpy()
    rounded = gfloat.encode_ndarray(format_info_ocp_e4m3, gfloat.round_ndarray(format_info_ocp_e4m3, exact, sat=True))
    np.testing.assert_array_equal(ours[number], rounded.flatten().astype(np.uint8)[number])


@SCALARS
@given(values=matrices(finite=False))
def test_e2m1_is_that_of_ml_dtypes_and_gfloat(values: torch.Tensor):
    from gfloat.formats import format_info_ocp_e2m1

    clamped = values.float().clamp(-6, 6).nan_to_num(0.0)
    ours = to_e2m1(values.float()).numpy().flatten()
    number = ~values.isnan().flatten().numpy()
    other = clamped.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8).flatten() & 15
    np.testing.assert_array_equal(ours[number], other[number])
    rounded = gfloat.round_ndarray(format_info_ocp_e2m1, clamped.double().numpy(), sat=True)
    np.testing.assert_array_equal(from_e2m1(torch.from_numpy(ours)).numpy()[number], rounded.flatten()[number])
    assert (ours[~number] == 0).all()


def test_values_of_all_codes_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    exponents = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(from_e8m0(torch.from_numpy(codes)).numpy(), exponents)
    fp4 = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(from_e2m1(torch.from_numpy(codes[:16])).numpy(), fp4)


def test_ml_dtypes_overflows_to_nan_where_we_saturate():
    top = np.array([500.0, np.inf, -np.inf], dtype=np.float32)
    assert np.isnan(top.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all()
    assert to_e4m3(torch.from_numpy(top)).float().tolist() == [448.0, 448.0, -448.0]


def torchao_mx(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    family, _, rule = name.partition("/")
    kind = torch.float8_e4m3fn if family == "mxfp8" else torch.float4_e2m1fn_x2
    scale, codes = to_mx(values.contiguous(), kind, 32, ScaleCalculationMode[rule.upper()])
    return bits(codes), bits(scale)


@needs_torchao
@SCALARS
@given(values=matrices(), name=st.sampled_from(["mxfp8/floor", "mxfp8/even", "mxfp4/floor", "mxfp4/even"]))
def test_mx_by_floor_and_even_is_that_of_torchao(values: torch.Tensor, name: str):
    ours = get_format(name).quantize(values)
    codes, scale = torchao_mx(values, name)
    assert torch.equal(bits(ours.scale), scale)
    has_exponent = (ours.scale > 0).repeat_interleave(16 if "fp4" in name else 32, 1).flatten()
    assert torch.equal(bits(ours.codes)[has_exponent], codes[has_exponent])


@needs_torchao
@SCALARS
@given(values=matrices(), name=st.sampled_from(["mxfp8/rceil", "mxfp4/rceil"]))
def test_mx_by_rceil_is_that_of_torchao_except_at_its_two_defects(values: torch.Tensor, name: str):
    ours = get_format(name).quantize(values)
    codes, scale = torchao_mx(values, name)
    largest = 448.0 if "fp8" in name else 6.0
    ratio = values.float().abs().unflatten(1, (-1, 32)).amax(-1).double() / largest
    away = (torch.log2(ratio.clamp(min=1e-300)) - torch.log2(ratio.clamp(min=1e-300)).round()).abs() > 1e-5
    sound = away & (ours.scale > 0) & (ratio < 2.0**126)
    assert torch.equal(ours.scale[sound], scale.reshape(ours.scale.shape)[sound])
    spread = sound.repeat_interleave(16 if "fp4" in name else 32, 1).flatten()
    assert torch.equal(bits(ours.codes)[spread], codes[spread])


@needs_torchao
def test_torchao_takes_the_wrong_exponent_just_above_powers_of_two():
    values = torch.zeros(512, 32)
    above = torch.tensor(448.0) * torch.exp2(torch.arange(-64.0, 64.0).repeat(4))
    values[:, 0] = torch.nextafter(above, torch.tensor(torch.inf))
    exact = torch.ceil(torch.log2(values[:, 0].double() / 448) - 1e-12) + 127
    ours = get_format("mxfp8/rceil").quantize(values).scale.flatten()
    assert torch.equal(ours.double(), exact)
    assert (torchao_mx(values, "mxfp8/rceil")[1] != ours).sum() > 50


@needs_torchao
def test_torchao_loses_blocks_whose_exponent_is_zero():
    values = torch.full((1, 32), 2.0**-130)
    assert get_format("mxfp8/rceil").fake_quantize(values)[0, 0] == 2.0**-130
    codes, scale = torchao_mx(values, "mxfp8/rceil")
    assert (int(scale[0]), int(codes[0])) == (0, 0)


@needs_torchao
@SCALARS
@given(values=matrices(), rule=st.sampled_from(["torchao2", "1level"]))
def test_nvfp4_by_torchaos_rules_is_that_of_torchao(values: torch.Tensor, rule: str):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    above = per_tensor_amax_to_scale(values.abs().amax())
    if rule == "torchao2" and (above == 0 or (1 / above).isinf()):
        return  # NaN there; see the next test
    scale, codes = nvfp4_quantize(values.contiguous(), 16, above if rule == "torchao2" else None)
    ours = get_format(f"nvfp4/{rule}").quantize(values)
    assert torch.equal(bits(ours.scale), bits(scale))
    assert torch.equal(bits(ours.codes), bits(codes))


@needs_torchao
def test_torchao_makes_nan_of_a_tensor_of_zeros():
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scale, _ = nvfp4_quantize(torch.zeros(1, 16), 16, torch.zeros(()))
    assert scale.float().isnan().all()
    assert get_format("nvfp4/torchao2").fake_quantize(torch.zeros(1, 16)).abs().max() == 0


@SCALARS
@given(values=matrices(finite=True))
def test_int4_by_compressed_tensors_rule_is_that_of_compressed_tensors(values: torch.Tensor):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    groups = values.unflatten(1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    codes = quantize(values, scale, zero, arguments, dtype=torch.int8)
    format = get_format("int4_g32/ct")
    ours = format.quantize(values)
    assert torch.equal(ours.codes, pack_to_int32(codes, 4))
    assert torch.equal(ours.scale, scale.to(torch.bfloat16))


def three_products_of_torchao(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    fp8 = torch.float8_e4m3fn
    y = mx_mm.apply(
        x, w, fp8, fp8, fp8, 32, KernelPreference.EMULATED, config.MXFP8Dim0CastKernelChoice.TORCH,
        config.MXFP8Dim1CastKernelChoice.TORCH, config.ScaleCalculationMode.RCEIL, False,
    )  # fmt: skip
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


@needs_torchao
@settings(deadline=None, max_examples=15)
@given(
    tokens=st.sampled_from([32, 64, 96]),
    rows=st.sampled_from([32, 96]),
    columns=st.sampled_from([64, 128]),
    seed=st.integers(0, 1000),
)
def test_three_products_of_mxfp8_are_those_of_torchao(tokens: int, rows: int, columns: int, seed: int):
    shapes = [(tokens, columns), (rows, columns), (tokens, rows)]
    x, w, g = (normal(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    for matrix in (x, w, g, x.t(), w.t(), g.t()):
        codes, scale = torchao_mx(matrix.contiguous(), "mxfp8/rceil")
        ours = get_format("mxfp8/rceil").quantize(matrix)
        if not torch.equal(bits(ours.scale), scale) or not torch.equal(bits(ours.codes), codes):
            return  # an input on which its exponent is wrong
    scheme = Scheme(weight=get_format("mxfp8"), activation=get_format("mxfp8"), source_dtype=torch.bfloat16)
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = train_linear(leaf_x, leaf_w, scheme)
    y.backward(g)
    for ours, theirs in zip((y, leaf_x.grad, leaf_w.grad), three_products_of_torchao(x, w, g), strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_nvfp4_by_modelopts_rule_is_that_of_modelopt_up_to_the_sign_of_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = pytest.importorskip(
            "modelopt.torch.quantization.qtensor", reason="scripts/quant-references.sh runs this"
        )
    for seed in range(50):
        values = normal(8, 64, seed=seed, dtype=torch.float32) * 2.0 ** (seed % 20 - 10)
        packed, scale, above = qtensor.NVFP4QTensor.quantize(values.clone(), 16)
        ours = get_format("nvfp4/modelopt").quantize(values)
        assert torch.equal(bits(ours.scale), bits(scale))
        assert float(ours.global_scale) == float(above)
        theirs = packed._quantized_data.reshape(-1)
        for shift in (0, 4):
            a, b = ours.codes.flatten() >> shift & 15, theirs >> shift & 15
            assert torch.equal(torch.where(a == 8, 0, a), torch.where(b == 8, 0, b))
    zeros = qtensor.NVFP4QTensor.quantize(torch.tensor([[-0.0, 1.0] * 8]), 16)[0]._quantized_data
    assert int(zeros[0, 0]) & 15 == 0
    assert int(get_format("nvfp4/modelopt").quantize(torch.tensor([[-0.0, 1.0] * 8])).codes[0, 0]) & 15 == 8
    assert qtensor.NVFP4QTensor.quantize(torch.zeros(1, 16), 16)[1].float().isnan().all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fp8_1x128/div", "fp8_1x128/te"),
        ("fp8_1x128/div", "fp8_1x128/miles"),
        ("fp8_128x128/te", "fp8_128x128/te_pow2"),
        ("mxfp8/rceil", "mxfp8/floor"),
        ("mxfp4/floor", "mxfp4/even"),
        ("nvfp4/te", "nvfp4/modelopt"),
        ("nvfp4/te", "nvfp4/te_4o6_MSE"),
        ("nvfp4/te_4o6_MAE", "nvfp4/te_4o6_MSE"),
        ("int4_g32/miles", "int4_g32/ct"),
    ],
)
def test_rules_of_one_family_are_different_numbers(one: str, other: str):
    first, second = get_format(one), get_format(other)
    assert any(
        not torch.equal(first.fake_quantize(weight), second.fake_quantize(weight))
        for weight in (normal(256, 512, seed=seed) for seed in range(10))
    )
