"""Number formats on a GPU: the bytes of the CPU, whichever code makes them."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

FORMATS = [
    "fp8_tensor/te", "fp8_row/div", "fp8_1x128/div", "fp8_1x128/miles", "fp8_1x128/te", "fp8_1x128/te_pow2",
    "fp8_128x128/div", "mxfp8/rceil", "mxfp8/floor", "mxfp4/rceil", "mxfp4/even", "nvfp4/te", "nvfp4/te_row",
    "nvfp4/te_4o6_MSE", "nvfp4/modelopt", "int4_g32/miles", "int4_g32/ct",
]  # fmt: skip


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_scales_and_values_are_the_same_bits_as_on_the_cpu(name: str, dtype: torch.dtype):
    from miles_quant import get_format
    from miles_quant.native.triton_kernels import edges

    format = get_format(name)
    weight = edges(dtype).nan_to_num() if format.name.has_tensor_scale else edges(dtype)
    expected, computed = format.quantize(weight), format.quantize(weight.cuda())

    assert same_bytes(computed.scale, expected.scale)
    assert same_bytes(computed.codes, expected.codes)
    values, reference = format.dequantize(computed).cpu(), format.dequantize(expected)
    torch.testing.assert_close(values, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name", ["mxfp8/rceil", "fp8_1x128/div", "fp8_1x128/miles", "fp8_1x128/te", "fp8_1x128/te_pow2"]
)
def test_the_triton_kernels_are_used_and_equal_the_formats(name: str, dtype: torch.dtype):
    pytest.importorskip("triton")
    from miles_quant import get_format
    from miles_quant.native import triton_kernels

    format, weight = get_format(name), triton_kernels.edges(dtype).cuda()
    found = triton_kernels.quantize(format, weight)
    assert found is not None, "the kernel gave way to torch: its bytes differ from the format's"
    expected = format.quantize(weight.cpu())
    assert same_bytes(found[0], expected.codes)
    assert same_bytes(found[1], expected.scale)


def test_mxfp8_training_is_the_same_on_gpu_and_cpu_up_to_the_order_of_sums():
    from miles_quant import get_format
    from miles_quant.nn.matmul import Scheme, train_linear

    spec = get_format("mxfp8")
    scheme = Scheme(weight=spec, activation=spec, source_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*shape, generator=generator) for shape in ((64, 256), (128, 256), (64, 128)))
    results: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        leaf_x, leaf_w = x.to(device).requires_grad_(), w.to(device).requires_grad_()
        y = train_linear(leaf_x, leaf_w, scheme)
        y.backward(g.to(device))
        assert leaf_x.grad is not None
        assert leaf_w.grad is not None
        results[device] = [y.detach().cpu(), leaf_x.grad.cpu(), leaf_w.grad.cpu()]
    for expected, computed in zip(results["cpu"], results["cuda"], strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fp8_tensor/te", "fp8_row/div", "fp8_128x128/div", "mxfp8/rceil", "nvfp4/te"])
def test_tensor_cores_multiply_the_codes_as_the_emulation_does(name: str, dtype: torch.dtype):
    from miles_quant import get_format
    from miles_quant.nn import hardware

    weight = get_format(name)
    if not hardware._is_capable(weight, torch.cuda.get_device_capability()):
        pytest.skip(f"no tensor cores for {name} on {torch.cuda.get_device_name()}")
    assert weight.activation is not None
    formats = weight.activation, weight
    generator = torch.Generator().manual_seed(0)
    a, b = (
        format.quantize(torch.randn(rows, 1024, generator=generator).cuda())
        for format, rows in zip(formats, (48, 256), strict=True)
    )
    y = hardware.product(a, b, formats, dtype=dtype)
    assert y is not None, "torch refused the product, or it differs from the emulation: see the warning"
    expected = hardware.emulated(a, b, formats)
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=hardware.TOLERANCE * float(expected.abs().max()))
    one = hardware.product(formats[0].quantize(torch.ones(1, 1024).cuda()), b, formats, dtype=dtype)
    assert one is not None
    assert one.shape == (1, 256)
