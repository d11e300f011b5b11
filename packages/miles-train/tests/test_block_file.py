"""Blocks come back out of files as any other blocks, whatever cut them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_train.checkpoint import block_file
from miles_train.checkpoint.block_file import Block, BlockFile, file_bytes, write_blocks
from safetensors.torch import load_file

Box = tuple[tuple[int, int], ...]


def cut(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)].clone()


def boxes(sizes: list[int], cuts: list[list[int]]) -> list[Box]:
    """Every box that cutting each dimension at those places makes, empty ones left out."""
    made: list[Box] = [()]
    for size, places in zip(sizes, cuts, strict=True):
        edges = sorted({0, size, *(place % (size + 1) for place in places)})
        made = [(*box, edge) for box in made for edge in itertools.pairwise(edges)]
    return made


CUTS = st.lists(st.integers(0, 20), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    stored=st.lists(CUTS, min_size=3, max_size=3),
    wanted=st.lists(CUTS, min_size=3, max_size=3),
    files=st.integers(1, 4),
)
def test_any_cut_is_read_back_as_any_other(sizes, stored, wanted, files):
    whole = torch.randn(sizes)
    with TemporaryDirectory() as name:
        folder = Path(name)
        parts = boxes(sizes, stored[: len(sizes)])
        for index in range(files):  # a name comes once in a file, as a rank holds one block of a tensor
            held = [Block(f"w{n}", tuple(sizes), box, cut(box, whole)) for n, box in enumerate(parts)][index::files]
            write_blocks(folder / str(index), held, {})
        opened = [BlockFile(folder / str(index)) for index in range(files)]
        for box in boxes(sizes, wanted[: len(sizes)]):
            target = torch.full([stop - start for start, stop in box], torch.nan)
            found = sum(file.copy_into(target, f"w{n}", box) for file in opened for n in range(len(parts)))
            assert found == target.numel()
            assert torch.equal(target, cut(box, whole))


@pytest.mark.parametrize("dtype", list(block_file._NAMES))
def test_every_type_comes_back_bit_for_bit(tmp_path, dtype):
    values = torch.arange(7).to(dtype)
    blocks = [
        Block("odd", (3,), ((0, 3),), torch.tensor([1, 2, 3], dtype=torch.uint8)),
        Block("all", (7,), ((0, 7),), values),
        Block("scalar", (), (), torch.tensor(2.5)),
    ]
    size = write_blocks(tmp_path / "file", blocks, {"note": [1, "two"]})
    assert size == file_bytes(blocks, {"note": [1, "two"]}) == (tmp_path / "file").stat().st_size
    file = BlockFile(tmp_path / "file")
    assert file.extra == {"note": [1, "two"]}
    assert file.shapes() == {"odd": (3,), "all": (7,), "scalar": ()}
    assert torch.equal(load_file(tmp_path / "file")["all"], values)
    target = torch.zeros(2, dtype=dtype)
    assert file.copy_into(target, "all", ((5, 7),)) == 2
    assert torch.equal(target, values[5:7])
    scalar = torch.zeros(())
    assert file.copy_into(scalar, "scalar", ()) == 1
    assert scalar == 2.5
    assert file.copy_into(scalar, "absent", ()) == 0


def test_entries_begin_at_a_multiple_of_their_width(tmp_path):
    blocks = [
        Block("a", (3,), ((0, 3),), torch.zeros(3, dtype=torch.uint8)),
        Block("b", (5,), ((0, 5),), torch.zeros(5, dtype=torch.bfloat16)),
        Block("c", (2,), ((0, 2),), torch.zeros(2, dtype=torch.float64)),
    ]
    write_blocks(tmp_path / "file", blocks, {})
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    entries = json.loads(content[8 : 8 + length])
    assert [entries[name]["data_offsets"][0] % width for name, width in (("a", 1), ("b", 2), ("c", 8))] == [0, 0, 0]
