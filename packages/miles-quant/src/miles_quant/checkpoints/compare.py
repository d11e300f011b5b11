"""Two folders of one model, tensor by tensor: the same codes, the same scales, and how far apart the values are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ModelFolderError
from .folder import ModelFolder

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """One tensor of the model, by the name of its weight."""

    name: str
    codes_equal: bool | None
    """All bytes of the codes; None unless both folders hold it in one format."""
    scales_equal: bool | None
    """All bytes of the scales; None unless both folders hold it in one format."""
    max_error: float
    """Largest absolute difference of the values; infinite where one alone is NaN."""
    mean_error: float
    """Mean absolute difference of the values."""
    cosine: float
    """Of the two tensors as vectors; 1 for two of zeros."""

    @property
    def is_equal(self) -> bool:
        """Bytes where both are in one format, values elsewhere."""
        if self.codes_equal is None or self.scales_equal is None:
            return self.max_error == 0
        return self.codes_equal and self.scales_equal


def compare(first: str | Path, second: str | Path) -> Iterator[ComparedTensor]:
    """Every tensor of two folders, plain or quantised, in the order of the first.

    Raises:
        ModelFolderError: a folder is half-written, or one has a tensor that the other lacks.
    """
    a, b = ModelFolder(first), ModelFolder(second)
    names = a.names
    only = sorted(set(names) ^ set(b.names))
    if only:
        where = first if only[0] in names else second
        raise ModelFolderError(f"{len(only)} tensors are in one folder alone, e.g. {only[0]} in {where}.")
    for name in names:
        yield _compare(name, a, b)


def _compare(name: str, a: ModelFolder, b: ModelFolder) -> ComparedTensor:
    codes_equal = scales_equal = None
    if name in a.quantized & b.quantized and a.format.parts == b.format.parts:
        ours, theirs = a.read_stored(name), b.read_stored(name)
        codes_equal, *scales = (_same_bytes(ours[part.suffix], theirs[part.suffix]) for part in a.format.parts)
        scales_equal = all(scales)
    x, y = (folder.values(name, torch.float32) for folder in (a, b))
    if x.shape != y.shape:
        raise ModelFolderError(f"{name} is {tuple(x.shape)} in one folder and {tuple(y.shape)} in the other.")
    largest, total, dot, norm_x, norm_y = 0.0, 0.0, 0.0, 0.0, 0.0
    for part_x, part_y in zip(x.reshape(-1).split(_CHUNK), y.reshape(-1).split(_CHUNK), strict=True):
        u, v = part_x.double(), part_y.double()
        is_same = (u == v) | (u.isnan() & v.isnan())  # the difference of two infinities is no number
        distance = torch.where(is_same, 0.0, (u - v).abs()).nan_to_num(nan=math.inf)  # NaN is as far as can be
        largest = max(largest, float(distance.max())) if len(distance) else largest
        total += float(distance.sum())
        dot, norm_x, norm_y = dot + float(u @ v), norm_x + float(u @ u), norm_y + float(v @ v)
    lengths = (norm_x * norm_y) ** 0.5
    return ComparedTensor(
        name=name,
        codes_equal=codes_equal,
        scales_equal=scales_equal,
        max_error=largest,
        mean_error=total / max(x.numel(), 1),
        cosine=dot / lengths if lengths else float(norm_x == norm_y),
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))
