"""The interface of a number format; each format has a file of its own beside this one.

A format is a pure function from a matrix to the bytes that are stored. Everything else in the package is that function
applied somewhere: converter and exporter write its bytes, fake quantisation reads them back, checks compare them.

    weight [N, K] ──quantize──> QuantizedTensor ──dequantize──> the value that engine and trainer compute with
                                   │      ▲
                                 store  restore
                                   ▼      │
                          tensors of the checkpoint, by the names that engines expect
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import QuantError
from ..native import kernels
from .blocks import shape_of
from .names import FormatName


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """Codes and scales of one matrix [N, K]."""

    codes: torch.Tensor
    """FP8: [N, K] float8_e4m3fn. FP4: [N, ceil(K / 2)] uint8, low nibble first. INT4: [N, ceil(K / 8)] int32."""
    scale: torch.Tensor
    """[ceil(N / block rows), ceil(K / block columns)]: float32, E8M0 as uint8, E4M3 or bfloat16."""
    global_scale: torch.Tensor | None = None
    """NVFP4 only: [1] float32, or [N] where every row has its own."""
    shape: tuple[int, int]
    """(N, K): padding in the codes is not part of the matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One tensor that a quantised `x.weight` becomes in a checkpoint."""

    suffix: str
    """`weight_scale_inv` makes `x.weight_scale_inv`."""
    dtype: torch.dtype
    tile: tuple[int, int] | None
    """Rows and columns of the matrix behind one element; 0 is a whole dimension. None: one for the whole matrix."""
    whole_shape: tuple[int, ...] = ()
    """Its shape where `tile` is None."""
    content: Literal["codes", "scale", "global_scale", "one", "shape"]
    """The field of `QuantizedTensor` that it holds, or the number 1."""

    def shape_of(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape for a matrix of shape `matrix`."""
        if self.tile is None:
            return self.whole_shape
        return tuple(-(-n // (t or n)) for n, t in zip(matrix, self.tile, strict=True))

    def value_of(self, quantized: QuantizedTensor) -> torch.Tensor:
        """What is stored of `quantized`."""
        if self.content in ("one", "shape"):
            plain = 1 if self.content == "one" else quantized.shape
            return torch.tensor(plain, dtype=self.dtype, device=quantized.codes.device)
        value: torch.Tensor = getattr(quantized, self.content)
        return value.reshape(self.whole_shape if self.tile is None else (len(value), -1)).contiguous()


@dataclass(frozen=True)
class Format(ABC):
    """A number format with its scale rule: the one definition of every byte. `get_format` makes it from a name.

    `quantize` is defined for every input: NaN and Inf go through the arithmetic as written in each file. Weights that
    hold them are refused where they enter a checkpoint or an engine (`round_to_source`).
    """

    name: FormatName

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredPart, ...]:
        """What is stored, codes first."""

    @property
    @abstractmethod
    def block(self) -> tuple[int, int]:
        """Rows and columns that share one scale; 0 is the whole dimension."""

    @property
    def activation(self) -> Format | None:
        """The format that engines quantise the other operand to, one token at a time; None leaves it as it is."""
        return None

    def quantize(self, weight: torch.Tensor, *, amax: torch.Tensor | None = None) -> QuantizedTensor:
        """Codes and scales of a floating matrix; edge blocks are padded with zeros.

        Args:
            weight: [N, K]; arithmetic is float32 unless the rule says otherwise.
            amax: the largest absolute value of all that shares the tensor's scale (other shards, or the sibling of a
                fused pair), for formats with `name.has_tensor_scale`.

        Raises:
            QuantError: not a floating matrix, or `amax` is below a value of `weight`.
        """
        check_matrix(weight)
        weight = weight.detach()
        if not self.name.has_tensor_scale:
            if amax is not None:
                raise QuantError(f"{self.name} has no scale of the whole tensor, so `amax` has no place in it.")
            return self._compute(weight, None)
        local = self.amax(weight)
        if amax is None:
            amax = local
        else:
            amax = amax.detach().to(local).reshape(())
            if bool(local > amax):
                raise QuantError(
                    f"`amax` {float(amax):.9g} is below the largest absolute value of the matrix, {float(local):.9g}; "
                    "it must cover every shard and sibling."
                )
        return self._compute(weight, amax)

    def dequantize(self, quantized: QuantizedTensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[N, K], the value that an engine computes with: float32 arithmetic, rounded once to `dtype`."""
        self._check_shapes(quantized)
        found = kernels.dequantize(self, quantized, dtype)
        return self.dequantize_in_torch(quantized).to(dtype) if found is None else found

    def fake_quantize(self, weight: torch.Tensor, *, amax: torch.Tensor | None = None) -> torch.Tensor:
        """`dequantize(quantize(weight))` in the type of `weight`: what the trainer sees of the engine's weights."""
        return self.dequantize(self.quantize(weight, amax=amax), dtype=weight.dtype)

    def amax(self, weight: torch.Tensor) -> torch.Tensor:
        """The largest absolute value, float32 scalar; NaN if any value is."""
        rows = kernels.row_amax(weight.detach())
        return weight.detach().abs().amax().float() if rows is None else rows.amax()

    def store(self, quantized: QuantizedTensor) -> dict[str, torch.Tensor]:
        """Stored tensors by suffix, in the order of `parts`."""
        return {part.suffix: part.value_of(quantized) for part in self.parts}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        """The inverse of `store`.

        Raises:
            QuantError: a tensor is missing, or has another type or shape than this format stores.
        """
        missing = [part.suffix for part in self.parts if part.suffix not in tensors]
        if missing:
            raise QuantError(f"{self.name} stores {[p.suffix for p in self.parts]}; {missing} are not there.")
        tensors = {suffix: t.int() if t.dtype == torch.int64 else t for suffix, t in tensors.items()}  # shapes
        for part in self.parts:
            if tensors[part.suffix].dtype != part.dtype:
                raise QuantError(
                    f"`{part.suffix}` is {tensors[part.suffix].dtype}; {self.name} stores it as {part.dtype}."
                )
        held = {part.content: tensors[part.suffix] for part in self.parts}
        codes, scale, above = held["codes"], held["scale"], held.get("global_scale")
        rows, columns = self.shape_of_codes(codes.shape) if "shape" not in held else held["shape"].tolist()
        scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
        above = None if above is None else above.flatten()
        quantized = QuantizedTensor(codes=codes, scale=scale, global_scale=above, shape=(rows, columns))
        self._check_shapes(quantized)
        return quantized

    def shape_of_codes(self, codes: Sequence[int]) -> tuple[int, int]:
        """Shape of the matrix whose codes have the shape `codes`, which INT4 pads to whole words."""
        tile = self.parts[0].tile
        assert tile is not None, "codes are stored in rows and columns"
        return codes[0] * tile[0], codes[1] * tile[1]

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales of a matrix of `shape`."""
        rows, columns = (b or n for b, n in zip(self.block, shape, strict=True))
        return -(-shape[0] // rows), -(-shape[1] // columns)

    @abstractmethod
    def quantize_in_torch(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        """The reference that compiled kernels equal bit for bit; `quantize` calls it where there is no kernel."""

    @abstractmethod
    def dequantize_in_torch(self, quantized: QuantizedTensor) -> torch.Tensor:
        """[N, K] float32, the reference of `dequantize`."""

    def _compute(self, weight: torch.Tensor, amax: torch.Tensor | None) -> QuantizedTensor:
        found = kernels.quantize(self, weight, amax)
        if found is None:
            return self.quantize_in_torch(weight, amax)
        codes, scale, global_scale = found
        return QuantizedTensor(codes=codes, scale=scale, global_scale=global_scale, shape=shape_of(weight))

    def _check_shapes(self, quantized: QuantizedTensor) -> None:
        expected = self.grid(quantized.shape)
        if tuple(quantized.scale.shape) != expected:
            raise QuantError(
                f"Scale of shape {tuple(quantized.scale.shape)} for a matrix {quantized.shape} in {self.name}; "
                f"expected {expected}."
            )


def stored_name(weight: str, suffix: str) -> str:
    """The name of a stored part: `x.weight` and `weight_scale` make `x.weight_scale`."""
    return weight.removesuffix("weight") + suffix


def check_matrix(weight: torch.Tensor) -> None:
    """Raise QuantError unless `weight` is a floating matrix with at least one element."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantError(f"Only floating matrices are quantised, got shape {tuple(weight.shape)} and {weight.dtype}.")
    if weight.numel() == 0:
        raise QuantError(f"A matrix of shape {tuple(weight.shape)} has nothing to quantise.")


def round_to_source(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in the type that it is quantised from.

    Raises:
        QuantError: it is not of a floating type of two bytes or more, or holds NaN or Inf, or what `dtype` cannot hold.
    """
    check_floating(name, weight.dtype)
    rounded = weight.to(dtype)
    finite = torch.isfinite(rounded)
    if finite.all():
        return rounded
    index = (~finite).nonzero()[0].tolist()
    raise QuantError(
        f"{int((~finite).sum())} of {weight.numel()} values of {name} are NaN or Inf as {str(dtype)[6:]}, the first at "
        f"{index}: {weight[tuple(index)].item()}. The weight was broken before quantisation."
    )


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raise QuantError if a weight of type `dtype` is no number to be quantised, but codes or counts."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise QuantError(
            f"{name} is {str(dtype)[6:]}, which is quantised already or no weight; only bfloat16, float16, float32 and "
            "float64 are quantised. Dequantise it first, or keep it with `keep_bf16`."
        )
