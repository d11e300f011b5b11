"""Quantisation on one core, and conversion of a folder, beside what the machine can do.

    python benchmarks/quant.py              about a minute
    python benchmarks/quant.py --compile    also torch.compile, which takes minutes to compile
    python benchmarks/quant.py --json       the same numbers as JSON

GB/s count the bfloat16 side: bytes read by quantisation, bytes written by dequantisation. Every row is the best of many
repetitions in one process with one thread, so that a busy machine disturbs it least; STREAM copy (bytes read plus bytes
written) is measured between the rows. `target` is 0.9 of what kernels written by hand for one format reached on the
machine of the project's first measurements, times STREAM here over STREAM there (22.7 GB/s); for dequantisation,
10 GB/s times the same.

Columns: the kernels; the same formats through torch, eager and compiled; torchao and compressed-tensors, where they
are installed and know the format.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from miles_quant import Recipe, convert, get_format
from miles_quant.checkpoints.safetensors import TensorInfo, TensorWriter
from miles_quant.native.library import using

ROWS, COLUMNS = 1024, 8192
STREAM_THERE = 22.7
BY_HAND = {"mxfp8/rceil": 4.9, "fp8_1x128/div": 5.3, "nvfp4/te": 4.6, "int4_g32/miles": 9.2}
FORMATS = (
    "mxfp8/rceil",
    "fp8_1x128/div",
    "fp8_128x128/div",
    "fp8_128x128/te",
    "nvfp4/te",
    "nvfp4/te_row",
    "nvfp4/te_4o6_MSE",
    "mxfp4/rceil",
    "int4_g32/miles",
)


@dataclass(kw_only=True)
class Row:
    """One format in one direction, GB/s."""

    format: str
    direction: str
    speeds: dict[str, float] = field(default_factory=dict)
    target: float | None = None


def best(work: Callable[[], object], *, seconds: float = 0.6) -> float:
    """The shortest time of `work` among all that fit into `seconds`, at least three."""
    work()
    shortest, until, count = float("inf"), time.perf_counter() + seconds, 0
    while count < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        shortest, count = min(shortest, time.perf_counter() - start), count + 1
    return shortest


def stream_copy() -> float:
    source = np.ones(1 << 27, dtype=np.uint8)  # far beyond the caches
    target = np.empty_like(source)
    return 2 * source.nbytes / best(lambda: np.copyto(target, source), seconds=0.2) / 1e9


def other_libraries(weight: torch.Tensor) -> dict[tuple[str, str, str], Callable[[], object]]:
    """(format, direction, library) -> its way to do it."""
    work: dict[tuple[str, str, str], Callable[[], object]] = {}
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode  # pyright: ignore[reportMissingImports]
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx  # pyright: ignore[reportMissingImports]
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale  # pyright: ignore[reportMissingImports]

        kind = torch.float8_e4m3fn
        scale, codes = to_mx(weight, kind, 32, ScaleCalculationMode.RCEIL)
        work["mxfp8/rceil", "quantise", "torchao"] = lambda: to_mx(weight, kind, 32, ScaleCalculationMode.RCEIL)
        work["mxfp8/rceil", "dequantise", "torchao"] = lambda: to_dtype(codes, scale, kind, 32, torch.bfloat16)
        above = per_tensor_amax_to_scale(weight.abs().amax())
        work["nvfp4/te", "quantise", "torchao"] = lambda: nvfp4_quantize(weight, 16, above)
    except ImportError:
        pass
    try:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
        from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams

        arguments = QuantizationArgs(
            num_bits=4, type=QuantizationType.INT, strategy=QuantizationStrategy.GROUP, group_size=32, symmetric=True
        )

        def int4() -> object:
            groups = weight.unflatten(1, (-1, 32))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
            return pack_to_int32(quantize(weight, scale, zero, arguments, dtype=torch.int8), 4)

        work["int4_g32/miles", "quantise", "compressed-tensors"] = int4
    except ImportError:
        pass
    return work


def measure_formats(*, compile: bool) -> tuple[list[Row], float]:
    weight = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    others = other_libraries(weight)
    rows: list[Row] = []
    streams = [stream_copy()]

    def speed(work: Callable[[], object]) -> float:
        return weight.nbytes / best(work) / 1e9

    for name in FORMATS:
        format = get_format(name)
        amax = format.amax(weight) if format.name.has_tensor_scale else None
        packed = format.quantize(weight, amax=amax)
        ways: dict[str, Callable[[], object]] = {
            "quantise": lambda f=format, a=amax: f.quantize(weight, amax=a),
            "dequantise": lambda f=format, p=packed: f.dequantize(p),
        }
        for direction, work in ways.items():
            row = Row(format=name, direction=direction, speeds={"miles-quant": speed(work)})
            with using("torch"):
                row.speeds["torch"] = speed(work)
                if compile:
                    torch.compiler.reset()
                    row.speeds["torch.compile"] = compiled(work, speed)
            for (other_name, other_direction, library), other in others.items():
                if (other_name, other_direction) == (name, direction):
                    row.speeds[library] = speed(other)
            rows.append(row)
        streams.append(stream_copy())
    stream = max(streams)
    for row in rows:
        by_hand = BY_HAND.get(row.format) if row.direction == "quantise" else 10.0 / 0.9
        row.target = None if by_hand is None else 0.9 * by_hand * stream / STREAM_THERE
    return rows, stream


def compiled(work: Callable[[], object], speed: Callable[[Callable[[], object]], float]) -> float:
    try:
        return speed(torch.compile(work))
    except Exception as error:  # whatever the compiler raises: the row says that it did not work
        print(f"torch.compile: {type(error).__name__}", file=sys.stderr)
        return float("nan")


def measure_converter(folder: Path) -> dict[str, float]:
    """MB/s of the source, and of writing and reading as many bytes to the same disk."""
    tensors = 48
    infos = {
        f"model.layers.{i}.mlp.down_proj.weight": TensorInfo(dtype=torch.bfloat16, shape=(2048, 4096))
        for i in range(tensors)
    }
    (folder / "source").mkdir()
    weight = (torch.randn(2048, 4096) * 0.05).bfloat16()
    start = time.perf_counter()
    with TensorWriter(folder / "source" / "model.safetensors", infos, {}) as writer:
        for name in infos:
            writer.write(name, weight)
    results = {"disk write": tensors * weight.nbytes / (time.perf_counter() - start) / 1e6}
    (folder / "source" / "config.json").write_text(json.dumps({"num_hidden_layers": tensors}))
    start = time.perf_counter()
    (folder / "source" / "model.safetensors").read_bytes()
    results["disk read (cached)"] = tensors * weight.nbytes / (time.perf_counter() - start) / 1e6
    for name in ("mxfp8", "fp8", "int4"):
        start = time.perf_counter()
        convert(folder / "source", folder / name, Recipe(format=name), is_quiet=True)
        results[f"convert to {name}"] = tensors * weight.nbytes / (time.perf_counter() - start) / 1e6
    return results


def table(rows: list[Row], stream: float, converter: dict[str, float]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.speeds))
    lines = [f"STREAM copy {stream:.1f} GB/s (best between the rows); one thread, {ROWS} x {COLUMNS} bfloat16", ""]
    lines.append(f"{'format':<18} {'GB/s':<11}" + "".join(f"{c:>20}" for c in columns) + f"{'target':>10}")
    for row in rows:
        cells = "".join(f"{row.speeds[c]:>20.2f}" if c in row.speeds else f"{'-':>20}" for c in columns)
        lines.append(f"{row.format:<18} {row.direction:<11}{cells}{row.target or float('nan'):>10.2f}")
    lines += ["", *(f"{name:<24} {value:>8.0f} MB/s" for name, value in converter.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows, stream = measure_formats(compile=options.compile)
    with tempfile.TemporaryDirectory() as folder:
        converter = measure_converter(Path(folder))
    result: dict[str, Any] = {"stream_copy": stream, "rows": [asdict(row) for row in rows], "converter": converter}
    print(json.dumps(result, indent=2) if options.json else table(rows, stream, converter))
    return 0


if __name__ == "__main__":
    sys.exit(main())
