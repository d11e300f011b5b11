"""One linear layer in low precision: `y = q(x) q(w)^T`, and its gradients.

    MXFP8         all three products block-scaled as the hardware does it, each operand quantised along the dimension
                  that is summed over: y along K, dx along N (the weight quantised again, transposed), dw along tokens
    all others    forward on the values of the codes; gradients straight through the rounding (arXiv:1308.3432):
                  dx = g q(w), dw = g^T q(x)

Operands are multiplied in the type of `x`, from dequantised values: this is the emulation that the engine's kernels are
compared with. A result never depends on the other rows of `x`, because activations are scaled row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..formats.spec import Format, QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the two operands of a linear layer are quantised."""

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
    values = scheme.weight.dequantize(scheme.quantize(weight, amax), dtype=x.dtype)
    return functional.linear(_through(x, round_activation(x, scheme)), _through(weight, values))


def packed_linear(x: torch.Tensor, packed: QuantizedTensor, scheme: Scheme) -> torch.Tensor:
    """`y` from codes and scales alone: what an engine computes."""
    return functional.linear(round_activation(x, scheme), scheme.weight.dequantize(packed, dtype=x.dtype))


def round_activation(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`x` [..., K] as the engine's activation format holds it."""
    if scheme.activation is None or x.numel() == 0:
        return x
    return scheme.activation.fake_quantize(x.detach().reshape(-1, x.shape[-1])).reshape(x.shape)


def _through(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _StraightThrough.apply(x, value)


class _StraightThrough(torch.autograd.Function):
    """`value` forward; backward, the gradient goes to `x` as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


class _ThreeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scheme = scheme
        return functional.linear(_along_rows(x, scheme), _along_rows(weight, scheme, dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (grad,), scheme = grads, ctx.scheme
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _along_rows(grad, scheme) @ _along_rows(weight.t(), scheme, dtype=x.dtype).t()
        if ctx.needs_input_grad[1]:
            dw = (_along_rows(grad.t(), scheme) @ _along_rows(x.t(), scheme).t()).to(weight.dtype)
        return dx, dw, None


def _along_rows(matrix: torch.Tensor, scheme: Scheme, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of `matrix` quantised in blocks along its rows. With `dtype` it is a weight: rounded to its source type
    first, returned in `dtype`."""
    if matrix.numel() == 0:
        return matrix if dtype is None else matrix.to(dtype)
    source = matrix if dtype is None else matrix.to(scheme.source_dtype)
    return scheme.weight.dequantize(scheme.weight.quantize(source.contiguous()), dtype=dtype or matrix.dtype)
