"""Every format against a file of golden vectors: recorded inputs and the bytes that they must become.

Keys of the .npz: `input|CASE|DTYPE` is a matrix (bf16 as uint16 bits, or float32). `FORMAT|CASE|DTYPE|PART` is what it
must become: `q` codes, `s` scales, `g` NVFP4's scale above them; for INT4 `packed`, `s_f32` and `s_bf16`. `swizzle|in`
and `swizzle|out` are the 128x4 interleave. FP4 codes are compared up to the sign of zero, on which references differ.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .errors import QuantError
from .formats.int4 import Int4Format
from .formats.registry import get_format
from .formats.spec import Format
from .formats.swizzle import swizzle_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRow:
    """What `verify_golden` found for one format over all its cases."""

    format: str
    num_arrays: int
    num_bytes: int
    different_bytes: int
    first_difference: str | None
    """Key of the first array that differs."""


def verify_golden(path: str | Path) -> list[GoldenRow]:
    """One row a format of the file, in the file's order.

    Raises:
        QuantError: the file is not one of golden vectors, or names a format or part that this package does not know.
    """
    golden = _load(path)
    expected: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for key, array in golden.items():
        family, *rest = key.split("|")
        if family in ("input", "swizzle"):
            continue
        if len(rest) != 3:
            raise QuantError(f"Key {key!r} is not FORMAT|CASE|DTYPE|PART.")
        expected.setdefault(family, {}).setdefault("|".join(rest[:2]), {})[rest[2]] = array
    if not expected:
        raise QuantError(f"{path} holds no golden vectors (keys FORMAT|CASE|DTYPE|PART).")
    rows = [_verify_format(name, cases, golden) for name, cases in expected.items()]
    interleave = {key for key in golden if key.startswith("swizzle|")}
    if interleave:
        if interleave != {"swizzle|in", "swizzle|out"} or golden["swizzle|in"].ndim != 2:
            raise QuantError(f"{path} has {sorted(interleave)}; a matrix `swizzle|in` and `swizzle|out` go together.")
        swizzled = swizzle_scales(torch.from_numpy(golden["swizzle|in"])).numpy()
        rows.append(_row("swizzle", [("swizzle|out", swizzled, golden["swizzle|out"])]))
    return rows


def _load(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with Path(path).open("rb") as stream:
            file = np.load(stream)
            if isinstance(file, np.lib.npyio.NpzFile):
                return {key: file[key] for key in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise QuantError(f"{path} is not a readable .npz file: {error}") from error
    raise QuantError(f"{path} holds one array; a file of golden vectors is an .npz of many.")


def _verify_format(
    name: str, cases: Mapping[str, Mapping[str, np.ndarray]], golden: Mapping[str, np.ndarray]
) -> GoldenRow:
    format = get_format(name)
    compared: list[tuple[str, np.ndarray, np.ndarray]] = []
    for case, parts in cases.items():
        key = f"input|{case}"
        if key not in golden:
            raise QuantError(f"The file expects {name}|{case} but holds no {key!r}.")
        ours = _parts(format, _matrix(key, golden[key]))
        for part, expected in parts.items():
            if part not in ours:
                raise QuantError(f"{name} has parts {sorted(ours)}, not {part!r}.")
            computed = ours[part]
            if part == "q" and format.name.family in ("mxfp4", "nvfp4"):
                computed, expected = _without_negative_zero(computed), _without_negative_zero(expected)
            compared.append((f"{name}|{case}|{part}", computed, expected))
    return _row(name, compared)


def _parts(format: Format, matrix: torch.Tensor) -> dict[str, np.ndarray]:
    quantized = format.quantize(matrix)
    codes, scale = quantized.codes, quantized.scale
    if isinstance(format, Int4Format):
        exact = format.scale_before_rounding(matrix)
        bits = scale.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return {"packed": codes.numpy(), "s": exact.float().numpy(), "s_f32": exact.float().numpy(), "s_bf16": bits}
    parts = {"q": codes.view(torch.uint8).numpy()}
    parts["s"] = (scale if scale.dtype == torch.float32 else scale.view(torch.uint8)).numpy()
    if quantized.global_scale is not None:
        parts["g"] = quantized.global_scale.numpy()
    return parts


def _matrix(key: str, array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype != np.float32:
        raise QuantError(f"{key!r} is of type {array.dtype}; inputs are float32, or uint16 for the bits of bfloat16.")
    return torch.from_numpy(array)


def _without_negative_zero(packed: np.ndarray) -> np.ndarray:
    low, high = packed & 15, packed >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def _row(name: str, compared: list[tuple[str, np.ndarray, np.ndarray]]) -> GoldenRow:
    different, total, first = 0, 0, None
    for key, ours, golden in compared:
        if ours.shape != golden.shape or ours.dtype.itemsize != golden.dtype.itemsize:
            raise QuantError(
                f"{key}: {ours.dtype}{list(ours.shape)} computed, {golden.dtype}{list(golden.shape)} in the file."
            )
        differs = np.ascontiguousarray(ours).view(np.uint8) != np.ascontiguousarray(golden).view(np.uint8)
        total += differs.size
        if differs.any():
            different += int(differs.sum())
            first = first or key
    return GoldenRow(
        format=name,
        num_arrays=len(compared),
        num_bytes=total,
        different_bytes=different,
        first_difference=first,
    )
