"""One linear layer in low precision: `y = q(x) q(w)^T`, and its gradients.

    MXFP8         all three products block-scaled as the hardware does it, each operand quantised along the dimension
                  that is summed over: y along K, dx along N (the weight quantised again, transposed), dw along tokens
    all others    forward on the values of the codes; gradients straight through the rounding (arXiv:1308.3432):
                  dx = g q(w), dw = g^T q(x)

Operands are multiplied in the type of `x`, from dequantised values: this is the emulation that every kernel is compared
with. On a GPU whose tensor cores know the format, these multiply the codes themselves (`hardware`). A result never
depends on the other rows of `x` but through the kernel's order of sums: activations are scaled row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..formats.spec import Format, QuantizedTensor
from . import hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the two operands of a linear layer are quantised; `prepare_model` and `load_packed` make it from a recipe."""

    weight: Format
    activation: Format | None
    source_dtype: torch.dtype
    """Weights are rounded to this type first, as before they enter a checkpoint."""

    @property
    def has_three_products(self) -> bool:
        return self.weight.name.family == "mxfp8" and self.activation is not None

    def quantize(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        """The bytes that the engine holds for a master weight."""
        return self.weight.quantize(weight.detach().to(self.source_dtype), amax=amax)

    def amax(self, *weights: torch.Tensor) -> torch.Tensor | None:
        """The largest value of matrices that the engine fuses, where the format has a scale of the whole tensor."""
        if not self.weight.name.has_tensor_scale:
            return None
        return torch.stack([self.weight.amax(w.detach().to(self.source_dtype)) for w in weights]).max()


def train_linear(
    x: torch.Tensor, weight: torch.Tensor, scheme: Scheme, *, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """`y` with gradients for `x` and the master `weight`.

    Args:
        x: [..., K].
        weight: [N, K].
        amax: the largest value of all matrices fused with this one (`Scheme.amax`).
    """
    if scheme.has_three_products:
        rows = x.reshape(-1, x.shape[-1])
        return _ThreeProducts.apply(rows, weight, scheme).unflatten(0, x.shape[:-1])
    packed = scheme.quantize(weight, amax)
    x_value, w_value = round_activation(x, scheme), scheme.weight.dequantize(packed, dtype=x.dtype)
    y = _on_tensor_cores(x, packed, scheme)
    y = functional.linear(x_value.detach(), w_value) if y is None else y
    return _StraightThrough.apply(x, weight, y, x_value, w_value)


def packed_linear(x: torch.Tensor, packed: QuantizedTensor, scheme: Scheme) -> torch.Tensor:
    """`y` from codes and scales alone: what an engine computes."""
    y = _on_tensor_cores(x, packed, scheme)
    if y is not None:
        return y
    return functional.linear(round_activation(x, scheme), scheme.weight.dequantize(packed, dtype=x.dtype))


def _on_tensor_cores(x: torch.Tensor, packed: QuantizedTensor, scheme: Scheme) -> torch.Tensor | None:
    """`y`, or None where it has to be emulated."""
    if x.device.type != "cuda" or scheme.activation is None or x.numel() == 0:
        return None
    rows = scheme.activation.quantize(x.detach().reshape(-1, x.shape[-1]))
    y = hardware.product(rows, packed, (scheme.activation, scheme.weight), dtype=x.dtype)
    return None if y is None else y.unflatten(0, x.shape[:-1])


def round_activation(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`x` [..., K] as the engine's activation format holds it."""
    if scheme.activation is None or x.numel() == 0:
        return x
    return scheme.activation.fake_quantize(x.detach().reshape(-1, x.shape[-1])).reshape(x.shape)


class _StraightThrough(torch.autograd.Function):
    """`y` forward; backward, gradients go to `x` and `weight` as if these were `x_value` and `w_value` themselves."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        x, weight, y, x_value, w_value = operands
        ctx.save_for_backward(x_value, w_value)
        ctx.dtypes = x.dtype, weight.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_value, w_value = ctx.saved_tensors
        grad = grads[0]
        dx = (grad @ w_value).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            rows, tokens = (t.reshape(-1, t.shape[-1]) for t in (grad, x_value))
            dw = (rows.t() @ tokens).to(ctx.dtypes[1])
        return dx, dw, None, None, None


class _ThreeProducts(torch.autograd.Function):
    """MXFP8: forward product and both gradients on operands quantised along the dimension that is summed over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scheme = scheme
        return _product(x, weight.to(scheme.source_dtype), scheme, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,), scheme = grads, ctx.scheme
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product(grad, weight.t().to(scheme.source_dtype), scheme, dtype=x.dtype)
        if ctx.needs_input_grad[1]:
            dw = _product(grad.t(), x.t(), scheme, dtype=x.dtype).to(weight.dtype)
        return dx, dw, None


def _product(a: torch.Tensor, b: torch.Tensor, scheme: Scheme, *, dtype: torch.dtype) -> torch.Tensor:
    """[M, N] = q(a) q(b)^T in `dtype`, both quantised in blocks along their rows, over which is summed."""
    if a.numel() == 0 or b.numel() == 0:
        return functional.linear(a.to(dtype), b.to(dtype))
    formats = scheme.weight, scheme.weight
    qa, qb = (scheme.weight.quantize(matrix.contiguous()) for matrix in (a, b))
    y = hardware.product(qa, qb, formats, dtype=dtype)
    if y is not None:
        return y
    return functional.linear(*(scheme.weight.dequantize(q, dtype=dtype) for q in (qa, qb)))
