"""Codecs of weight deltas on consecutive optimizer steps of SmolLM2-135M, beside XOR + zstd-1 and the entropy.

    python benchmarks/weightsync.py codecs      a minute; the first time it trains too, see weightsync_steps.py

Sizes: bfloat16 weights, and what quantisation makes of them: FP8 e4m3 codes with a scale for 128 x 128 blocks, INT4
codes in groups of 32, two in a byte. Ratios are full bytes over bytes sent. `bound` is the entropy of which elements
change and by how much, in bits a change, as if every change were independent; `bound|exponent` is the same within each
exponent of the old value, which both sides know.

Speeds: one thread, CPU time, best of three, GB of the full array a second; zstd and the digest are included. `apply`
checks, decodes and patches in place. memcpy and XOR + zstd-1 are measured between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import zstandard
from miles_weightsync.delta import Codec, apply_blob, encode
from miles_weightsync.native import library
from weightsync_steps import FOLDER, LEARNING_RATES, Step, rehearsal, steps

CODECS: tuple[Codec, ...] = ("fast", "small")
_NUMPY_ELEMENTS = 1 << 23
_EXPONENT_SHIFT = {1: 3, 2: 7}


def measure(*, quick: bool, rates: Sequence[float] = LEARNING_RATES) -> dict[str, dict[str, float]]:
    """Rows of sizes, then rows of speeds."""
    torch.set_num_threads(1)
    native = [isa for isa in ("avx512", "avx2", "portable") if library._table(isa) is not None]
    sizes, speeds = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    for step in rehearsal() if quick else steps(FOLDER, rates):
        for name, old, new in formats(step):
            sizes[f"{step.rate:.0e} {name}"] = measure_sizes(old, new)
            for path in [*native, "numpy"] if name == "bf16" else native[:1]:
                few = slice(_NUMPY_ELEMENTS) if path == "numpy" else slice(None)
                for codec in CODECS:
                    speeds[f"{step.rate:.0e} {name} {codec} {path}"] = measure_speed(old[few], new[few], codec, path)
    return sizes | speeds


# ---- what is compared


def formats(step: Step) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The bit patterns of both versions, format by format."""
    old, new = as_bfloat16(step.old), as_bfloat16(step.new)
    yield "bf16", old, new
    for name, quantize in (("fp8 128x128", fp8_codes), ("int4 g32", int4_codes)):
        yield name, quantize(old, step.shapes), quantize(new, step.shapes)


def as_bfloat16(masters: np.ndarray) -> np.ndarray:
    """[N] uint16."""
    return torch.from_numpy(np.array(masters)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def matrices(weights: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> Iterator[torch.Tensor]:
    """The 2-D parameters in float32, of all in bfloat16 one after another."""
    at, values = 0, torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
    for shape in shapes:
        size = int(np.prod(shape))
        if len(shape) == 2:
            yield values[at : at + size].view(*shape).float()
        at += size
    assert at == weights.size, f"the shapes have {at} elements, the weights {weights.size}"


def fp8_codes(weights: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[N] uint8: e4m3 of each value over the largest of its 128 x 128 block, times 448."""
    parts = list[np.ndarray]()
    for matrix in matrices(weights, shapes):
        rows, columns = matrix.shape
        padded = torch.nn.functional.pad(matrix, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(padded.shape)
        parts.append(codes[:rows, :columns].contiguous().view(-1).numpy())
    return np.concatenate(parts)


def int4_codes(weights: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """[N / 2] uint8: two codes from -8 to 7 in a byte, each value over the largest of its 32 neighbours, times 7."""
    parts = list[np.ndarray]()
    for matrix in matrices(weights, shapes):
        groups = matrix.view(-1, 32)
        scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 7
        codes = (groups / scale).round().clamp(-8, 7).to(torch.int8).view(-1).numpy().view(np.uint8) & 15
        parts.append(codes[::2] | codes[1::2] << 4)
    return np.concatenate(parts)


# ---- sizes


def measure_sizes(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    changed = old != new
    changes, full = int(changed.sum()), old.nbytes
    independent, given = bounds(old, new, changed)
    xor = len(xor_zstd1(old, new))
    row = {"changed_%": 100 * changes / old.size, "xor_ratio": full / xor}
    for codec in CODECS:
        blob, target = encode(old, new, codec=codec), old.copy()
        apply_blob(target, blob)
        assert np.array_equal(target, new), f"{codec} does not restore the array"
        row |= {f"{codec}_ratio": full / len(blob), f"{codec}_bits": 8 * len(blob) / changes}
        row |= {f"xor/{codec}": xor / len(blob)}
        if codec == "small":
            row |= {"small/bound|exponent": 8 * len(blob) / given}
    return row | {"bound": independent / changes, "bound|exponent": given / changes}


def xor_zstd1(old: np.ndarray, new: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).view(np.uint8).data)


def bounds(old: np.ndarray, new: np.ndarray, changed: np.ndarray) -> tuple[float, float]:
    """Bits: entropy of positions and steps, of all elements alike and within each exponent of the old value."""
    exponents = old >> _EXPONENT_SHIFT[old.itemsize] & (0xFF if old.itemsize == 2 else 0xF)
    elements = np.bincount(exponents, minlength=256)
    moves = (new[changed] - old[changed]).view(f"i{old.itemsize}").astype(np.int64)
    kinds, moves = np.unique(moves, return_inverse=True)
    cells = exponents[changed].astype(np.int64) * kinds.size + moves
    table = np.bincount(cells, minlength=256 * kinds.size).reshape(256, kinds.size)
    given = sum(_entropy(int(n), table[e]) for e, n in enumerate(elements) if n)
    return _entropy(old.size, table.sum(axis=0)), given


def _entropy(elements: int, moves: np.ndarray) -> float:
    counts = np.append(moves, elements - moves.sum()).astype(float)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / elements)).sum())


# ---- speeds


def measure_speed(old: np.ndarray, new: np.ndarray, codec: Codec, path: str) -> dict[str, float]:
    blob, target = encode(old, new, codec=codec), old.copy()

    def reset() -> None:
        target[:] = old

    with library.using(path):
        encoding = best(lambda: encode(old, new, codec=codec))
        applying = best(lambda: apply_blob(target, blob), reset)
    gigabytes = old.nbytes / 1e9
    return {
        "encode_GB/s": gigabytes / encoding,
        "apply_GB/s": gigabytes / applying,
        "xor+zstd1_GB/s": gigabytes / best(lambda: xor_zstd1(old, new)),
        "memcpy_GB/s": gigabytes / best(reset),
    }


def best(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """CPU seconds of the shortest of three runs."""
    shortest = float("inf")
    for _ in range(3):
        before()
        start = time.process_time()
        work()
        shortest = min(shortest, time.process_time() - start)
    return shortest
