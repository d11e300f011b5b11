"""A linear layer that trains a master weight on the values that the engine will hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .matmul import Scheme, train_linear


class QuantLinear(nn.Linear):
    """`nn.Linear` whose forward pass computes with quantised values; its parameter stays in full precision.

    `prepare_model` turns Linears into it in place, so parameter names, ties, hooks and optimizers stay as they are.
    """

    scheme: Scheme
    _fused: tuple[nn.Linear, ...]

    @classmethod
    def convert(cls, linear: nn.Linear, scheme: Scheme, *, fused: Sequence[nn.Linear] = ()) -> QuantLinear:
        """Turn `linear` into a QuantLinear.

        Args:
            fused: the other layers that the engine loads as one matrix with this one.
        """
        linear.__class__ = cls
        assert isinstance(linear, QuantLinear)
        linear.scheme = scheme
        object.__setattr__(linear, "_fused", tuple(fused))  # not as children: each has its own place in the model
        return linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        amax = self.scheme.amax(self.weight, *(linear.weight for linear in self._fused))
        y = train_linear(input, self.weight, self.scheme, amax=amax)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.scheme.weight.name}"
