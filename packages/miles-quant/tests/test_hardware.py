"""Products of codes through `scaled_mm`: what torch can do of it on a CPU, and the choice between it and emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from miles_quant import get_format
from miles_quant.nn import hardware, matmul
from miles_quant.nn.matmul import Scheme, packed_linear, train_linear

from .conftest import normal


def scheme(name: str) -> Scheme:
    spec = get_format(name)
    return Scheme(weight=spec, activation=spec.activation, source_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["fp8_tensor/te", "fp8_row/div", "fp8_row/te_pow2"])
def test_products_of_codes_equal_the_emulation_up_to_the_order_of_sums(name: str):
    spec = get_format(name)
    assert spec.activation is not None
    formats = spec.activation, spec
    a, b = formats[0].quantize(normal(33, 256)), formats[1].quantize(normal(64, 256, seed=1))
    expected = hardware.emulated(a, b, formats)
    torch.testing.assert_close(
        hardware.multiply(a, b, formats, dtype=torch.float32),
        expected,
        rtol=1e-5,
        atol=float(expected.abs().max()) * 1e-6,
    )


def test_a_cpu_always_emulates():
    spec = get_format("fp8_row/div")
    q = spec.quantize(normal(64, 256))
    assert hardware.product(q, q, (spec, spec), dtype=torch.float32) is None


@pytest.mark.parametrize(
    ("name", "least"),
    [("fp8_tensor/te", (8, 9)), ("fp8_128x128/div", (9, 0)), ("mxfp8", (10, 0)), ("nvfp4", (10, 0)), ("int4", None)],
)
def test_a_format_waits_for_the_first_gpu_that_knows_it(name: str, least: tuple[int, int] | None):
    known = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    capable = [c for c in known if hardware._is_capable(get_format(name), c)]  # pyright: ignore[reportPrivateUsage]
    assert capable[:1] == ([] if least is None else [least])


def test_a_product_that_torch_refuses_or_that_is_wrong_is_emulated_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spec, cpu = get_format("mxfp8"), torch.device("cpu")
    agrees: Any = hardware._agrees.__wrapped__  # pyright: ignore[reportPrivateUsage]
    assert not agrees((spec, spec), cpu, torch.float32)  # torch has no MX products on a CPU
    assert "products of mxfp8/rceil are emulated on cpu: CPU does not support swizzle" in caplog.text
    row = get_format("fp8_row/div")
    assert agrees((row, row), cpu, torch.float32)
    monkeypatch.setattr(hardware, "multiply", lambda a, b, formats, dtype: hardware.emulated(a, b, formats) * 1.1)
    assert not agrees((row, row), cpu, torch.float32)
    assert "it differs from the emulation by 1.0e-01" in caplog.text


@pytest.mark.parametrize("name", ["fp8_tensor/te", "fp8_row/div"])
def test_training_through_codes_has_the_values_and_gradients_of_the_emulation(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    operands = scheme(name)
    x, w, g = (
        normal(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((3, 8, 64), (32, 64), (3, 8, 32)))
    )

    def run() -> list[torch.Tensor]:
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = train_linear(leaf_x, leaf_w, operands)
        y.backward(g)
        assert leaf_x.grad is not None
        assert leaf_w.grad is not None
        return [y.detach(), leaf_x.grad, leaf_w.grad]

    emulated = run()

    def on_tensor_cores(x: torch.Tensor, packed: Any, scheme: Scheme) -> torch.Tensor:
        assert scheme.activation is not None
        rows = scheme.activation.quantize(x.detach().reshape(-1, x.shape[-1]))
        y = hardware.multiply(rows, packed, (scheme.activation, scheme.weight), dtype=x.dtype)
        return y.unflatten(0, x.shape[:-1])

    monkeypatch.setattr(matmul, "_on_tensor_cores", on_tensor_cores)
    for computed, expected in zip(run(), emulated, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed_linear(x, operands.quantize(w, operands.amax(w)), operands), run()[0])
