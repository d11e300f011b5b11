"""Compiled kernels equal the formats on every input, and their absence changes nothing but the speed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_quant import QuantError, get_format
from miles_quant.formats.spec import QuantizedTensor
from miles_quant.native import build, library
from miles_quant.native.build import build_library, find_compiler
from miles_quant.native.library import find_kernels, using

from .conftest import bits, normal

FOLDER = Path(build.__file__).parent
ISAS = [isa for isa in ("avx512", "avx2", "portable") if library._table(isa) is not None]
ACCELERATED = (
    "fp8_tensor/div", "fp8_row/te", "fp8_1x128/div", "fp8_1x128/miles", "fp8_128x128/te", "fp8_16x32/te_pow2",
    "mxfp8/rceil", "mxfp8/floor", "mxfp8/even", "mxfp4/rceil", "mxfp4/floor", "mxfp4/even",
    "nvfp4/te", "nvfp4/te_row", "nvfp4/te_4o6_MSE", "nvfp4/te_4o6_MAE", "nvfp4/te_row_4o6_MSE",
    "int4_g32/miles", "int4_g128/miles",
)  # fmt: skip

needs_kernels = pytest.mark.skipif(not ISAS, reason="the kernels are not built here")


@st.composite
def patterns(draw: Any, rows: int = 5, columns: int = 512) -> torch.Tensor:
    """Any bits at all, or values around one magnitude: denormals, ties, both zeros, NaN, Inf, blocks of one kind."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["bits", "normal", "ties", "denormal", "zeros", "edge"]))
    shape = (rows, columns)
    match kind:
        case "bits":
            values = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
            values = np.where(rng.random((rows, 1)) < 0.5, np.nan_to_num(values), values)
        case "ties":
            values = rng.integers(-64, 65, shape).astype(np.float32) * np.float32(2.0 ** rng.integers(-140, 100))
        case "denormal":
            values = rng.integers(0, 2**23, shape, dtype=np.uint32).view(np.float32)
        case "zeros":
            values = np.where(rng.random(shape) < 0.99, -0.0, 1.0).astype(np.float32)
        case "edge":
            tops = rng.choice([448.0, 6.0, 7.0, 240.0, 1.0], shape) * 2.0 ** rng.integers(-60, 60, (rows, 1))
            values = np.nextafter(tops.astype(np.float32), rng.choice([0, np.inf], shape).astype(np.float32))
        case _:
            spread = 2.0 ** rng.integers(-30, 30, (rows, columns // 32)).repeat(32, 1)
            values = (rng.standard_normal(shape) * spread).astype(np.float32)
    if draw(st.booleans()):
        values[rng.random(shape) < 0.001] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38]))
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return tensor.bfloat16() if draw(st.booleans()) else tensor


def assert_same(ours: QuantizedTensor, theirs: QuantizedTensor) -> None:
    assert torch.equal(bits(ours.scale), bits(theirs.scale))
    assert torch.equal(bits(ours.codes), bits(theirs.codes))
    assert (ours.global_scale is None) == (theirs.global_scale is None)
    if ours.global_scale is not None and theirs.global_scale is not None:
        assert torch.equal(bits(ours.global_scale), bits(theirs.global_scale))


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(weight=patterns(), name=st.sampled_from(ACCELERATED), isa=st.sampled_from(ISAS or ["none"]))
def test_every_instruction_set_makes_the_bytes_of_the_format(weight: torch.Tensor, name: str, isa: str):
    format = get_format(name)
    with using("torch"):
        expected = format.quantize(weight)
        values = {dtype: format.dequantize(expected, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    with using(isa):
        assert_same(format.quantize(weight), expected)
        for dtype, value in values.items():
            torch.testing.assert_close(format.dequantize(expected, dtype=dtype), value, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", ["fp8", "nvfp4", "int4", "mxfp8", "mxfp4"])
def test_every_code_and_scale_comes_back_as_its_value(family: str, isa: str):
    """All bytes of codes under all bytes of scales, as far as a format stores them."""
    scales = torch.arange(256, dtype=torch.uint8)
    if family in ("fp8", "mxfp8"):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    elif family == "int4":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.int32)
    else:
        codes = torch.arange(256, dtype=torch.uint8)
    name, columns, scale = {
        "fp8": ("fp8_1x256/div", 256, torch.exp2(torch.arange(-150.0, 106.0))[:, None]),
        "nvfp4": ("nvfp4/te_row", 512, scales[:, None].expand(256, 32).contiguous().view(torch.float8_e4m3fn)),
        "int4": ("int4_g512/miles", 512, torch.exp2(torch.arange(-128.0, 128.0)).bfloat16()[:, None]),
        "mxfp8": ("mxfp8/rceil", 256, scales[:, None].expand(256, 8).contiguous()),
        "mxfp4": ("mxfp4/rceil", 512, scales[:, None].expand(256, 16).contiguous()),
    }[family]
    quantized = QuantizedTensor(
        codes=codes.expand(256, -1).contiguous(),
        scale=scale,
        global_scale=torch.linspace(1e-3, 2.0, 256) if family == "nvfp4" else None,
        shape=(256, columns),
    )
    for dtype in (torch.float32, torch.bfloat16):
        with using("torch"):
            expected = get_format(name).dequantize(quantized, dtype=dtype)
        with using(isa):
            found = get_format(name).dequantize(quantized, dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("name", ACCELERATED)
def test_work_cut_among_threads_gives_the_same_bytes(name: str):
    weight, threads = normal(700, 2048), torch.get_num_threads()
    format = get_format(name)
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            quantized = format.quantize(weight)
            results.append((quantized, format.dequantize(quantized)))
    finally:
        torch.set_num_threads(threads)
    assert_same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 33])
def test_the_maximum_of_a_block_is_found_wherever_it_is(isa: str, blocks: int):
    """Every position in every block of a run of sixteen, of either sign, and NaN of any payload, from any address."""
    format, columns = get_format("nvfp4/te_row"), blocks * 16
    values = torch.full((columns, columns), 0.01)
    top = torch.arange(1.0, columns + 1) * torch.where(torch.arange(columns) % 3 == 0, -1, 1)
    values.diagonal().copy_(top)
    broken = values.bfloat16()
    payloads = torch.tensor([0x7F81, 0x7FC0, 0x7FFF, -0x7F, -1], dtype=torch.int16)  # of both signs
    broken.view(torch.int16).diagonal().copy_(payloads[torch.arange(columns) % 5])
    pool = torch.cat([torch.zeros(3, dtype=torch.bfloat16), values.bfloat16().flatten()])
    for weight in (values, values.bfloat16(), broken, pool[3:].view(columns, columns), values.bfloat16().t()):
        with using("torch"):
            expected = format.quantize(weight)
        with using(isa):
            assert_same(format.quantize(weight), expected)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["mxfp8/rceil", "fp8_1x128/div", "mxfp4/rceil", "nvfp4/te_4o6_MSE", "int4_g32/miles"])
def test_a_thread_that_flushes_denormals_changes_no_byte_and_no_value(name: str, isa: str):
    """Values of small codes are denormals on the way, whatever the size of the weights."""
    format, weight = get_format(name), normal(64, 512) * torch.exp2(-torch.arange(512.0) % 13).bfloat16()
    with using(isa):
        expected = format.quantize(weight)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor always counts denormals")
        try:
            assert_same(format.quantize(weight), expected)
            found = format.dequantize(expected)
        finally:
            torch.set_flush_denormal(False)
    with using("torch"):
        assert torch.equal(found, format.dequantize(expected))


FORKED = """
import os, signal, sys, torch
from miles_quant import get_format
torch.set_num_threads(2)
weight = torch.ones(1024, 2048)
get_format("mxfp8").quantize(weight)
child = os.fork()
if child == 0:
    signal.alarm(20)
    get_format("mxfp8").quantize(weight)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@needs_kernels
def test_a_forked_child_has_threads_of_its_own():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], timeout=60).returncode == 0


@needs_kernels
def test_matrices_that_do_not_lie_in_one_piece_are_taken_too():
    weight = normal(256, 512)
    for view in (weight.t(), weight[:, :128], weight[::2]):
        for name in ("mxfp8/rceil", "fp8_128x128/div", "nvfp4/te", "int4_g32/miles"):
            assert_same(get_format(name).quantize(view), get_format(name).quantize(view.contiguous()))


def test_an_instruction_set_that_is_not_here_is_refused():
    with pytest.raises(QuantError, match="no kernels for sse9"), using("sse9"):
        pass


def test_without_kernels_torch_does_it_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    weight = normal(64, 256)
    expected = {name: get_format(name).quantize(weight) for name in ACCELERATED}
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    for cached in (library._table, library._library):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "miles_quant"):
            for name, quantized in expected.items():
                assert_same(get_format(name).quantize(weight), quantized)
            assert find_kernels() is None
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "the CPU kernels are not built" in said[0]
        assert "python -m miles_quant.native.build" in said[0]
    finally:
        monkeypatch.undo()
        for cached in (library._table, library._library):
            cached.cache_clear()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
def test_a_build_is_done_once_and_again_when_a_source_changes(tmp_path: Path):
    for source in build.SOURCES:
        shutil.copy2(FOLDER / source, tmp_path / source)
    built = build_library(tmp_path)
    first = built.stat().st_mtime_ns
    assert build_library(tmp_path).stat().st_mtime_ns == first
    (tmp_path / "dispatch.cpp").write_text((tmp_path / "dispatch.cpp").read_text() + "\n// changed\n")
    assert build_library(tmp_path).stat().st_mtime_ns > first
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*build.SOURCES, build.LIBRARY])

    (tmp_path / "kernels.cpp").write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match="failed with status 1"):
        build_library(tmp_path)
    assert not built.exists()


def test_a_machine_without_a_compiler_says_so(tmp_path: Path):
    for source in ("build.py", *build.SOURCES):
        shutil.copy2(FOLDER / source, tmp_path / source)
    command = [sys.executable, "-I", str(tmp_path / "build.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr
