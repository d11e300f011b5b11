"""The package imports light, and its console script fails with a sentence."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from miles_tito.cli import main

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "aiohttp", "httpx", "jinja2", "tokenizers", "ray", "sglang")


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, miles_tito; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_all_public_names_exist():
    import miles_tito

    assert all(getattr(miles_tito, name) is not None for name in miles_tito.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = miles_tito.absent  # pyright: ignore


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wire", "records.encoding"),
        ("merge", "tokens.merge"),
        ("layouts", "adapters.layouts"),
        ("families", "tokens.families"),
        ("routing", "engine.expert_routing"),
    ],
)
def test_a_module_that_moved_is_named_at_its_old_place(old: str, new: str):
    with pytest.raises(ModuleNotFoundError, match=rf"^miles_tito\.{old} is now miles_tito\.{new}"):
        importlib.import_module(f"miles_tito.{old}")
    assert importlib.import_module(f"miles_tito.{new}")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'miles_tito\.absent'"):
        importlib.import_module("miles_tito.absent")


def test_serve_without_a_tokenizer_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--engine", "http://127.0.0.1:9", "--tokenizer", str(tmp_path)]) == 1
    assert "max_position_embeddings" in capsys.readouterr().err


def test_serve_starts_and_ends_on_a_signal(tmp_path: Path, write_tokenizer: Any):
    folder = write_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "miles_tito", "serve", "--engine", "http://127.0.0.1:9", "--tokenizer"]
    process = subprocess.Popen(
        [*command, str(folder), "--max-context", "100", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "serving http://127.0.0.1:" in line
        process.send_signal(2)
        assert process.wait(timeout=20) in (0, 130)
    finally:
        process.kill()
        process.communicate()
