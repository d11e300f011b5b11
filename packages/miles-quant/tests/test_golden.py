"""Every golden vector, and the command that checks them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from miles_quant import QuantError, verify_golden
from miles_quant.cli import main


def test_every_format_equals_every_golden_byte(golden: Path):
    rows = verify_golden(golden)

    assert [row for row in rows if row.different_bytes] == []
    assert len(rows) == 26
    compared = sum(row.num_arrays for row in rows)
    inputs = sum(key.startswith(("input|", "swizzle|in")) for key in np.load(golden).files)
    assert compared + inputs == len(np.load(golden).files)


def tiny_golden(path: Path, *, codes: int) -> Path:
    """One block of MXFP8: 448 and zeros, whose code and exponent are known by heart."""
    weight = np.zeros((1, 32), dtype=np.float32)
    weight[0, 0] = 448.0
    expected = np.zeros((1, 32), dtype=np.uint8)
    expected[0, 0] = codes
    np.savez(
        path,
        **{
            "input|top|fp32": weight,
            "mxfp8/rceil|top|fp32|q": expected,
            "mxfp8/rceil|top|fp32|s": np.array([[127]], dtype=np.uint8),
        },
    )
    return path


def test_the_command_prints_a_row_a_format_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    golden = tiny_golden(tmp_path / "right.npz", codes=0x7E)
    assert main(["verify", "--golden", str(golden)]) == 0
    assert "all bytes equal" in capsys.readouterr().out
    assert main(["verify", "--golden", str(golden), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


def test_one_differing_byte_fails_the_command_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--golden", str(tiny_golden(tmp_path / "right.npz", codes=0x7E))]) == 0
    capsys.readouterr()

    assert main(["verify", "--golden", str(tiny_golden(tmp_path / "wrong.npz", codes=0x7D))]) == 1
    out = capsys.readouterr().out
    assert "mxfp8/rceil|top|fp32|q" in out
    assert "some bytes differ" in out


def test_a_file_without_golden_vectors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(QuantError, match=r"is not FORMAT\|CASE\|DTYPE\|PART"):
        verify_golden(tmp_path / "other.npz")
    assert main(["verify", "--golden", str(tmp_path / "absent.npz")]) == 1
    assert "absent.npz" in capsys.readouterr().err


def test_a_torn_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = tiny_golden(tmp_path / "right.npz", codes=0x7E).read_bytes()
    rotten = bytearray(whole)
    rotten[200] ^= 0xFF  # within the bytes of the first array
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (whole[: len(whole) // 2], b"", bytes(rotten), (tmp_path / "one.npy").read_bytes()):
        (tmp_path / "torn.npz").write_bytes(content)
        assert main(["verify", "--golden", str(tmp_path / "torn.npz")]) == 1
        assert "torn.npz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"input|top|fp32": np.zeros((1, 32))}, "is of type float64"),
        ({"input|top|fp32": np.zeros((1, 32), ">f4")}, "is of type >f4"),
        ({"swizzle|out": np.zeros(512, np.uint8)}, "go together"),
        ({"swizzle|in": np.zeros((4, 4), np.uint8)}, "go together"),
    ],
)
def test_a_file_that_cannot_be_checked_as_a_whole_is_refused(arrays: dict[str, np.ndarray], words: str, tmp_path: Path):
    right = dict(np.load(tiny_golden(tmp_path / "right.npz", codes=0x7E)))
    np.savez(tmp_path / "wrong.npz", **{**right, **arrays})
    with pytest.raises(QuantError, match=words):
        verify_golden(tmp_path / "wrong.npz")
