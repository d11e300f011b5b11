"""weightsync and quant work from a copied folder, under any name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, run

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
sys.path.insert(0, {folder!r})
import borrowed
for module in pkgutil.walk_packages(borrowed.__path__, "borrowed."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted(name for name in sys.modules if name.startswith("miles")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weightsync", "quant"])
def test_a_copied_folder_imports_under_another_name_and_reaches_for_no_sibling(name: str, tmp_path: Path):
    shutil.copytree(ROOT / f"packages/miles-{name}/src/miles_{name}", tmp_path / "vendor/borrowed")

    code = IMPORT_EVERYTHING.format(folder=str(tmp_path / "vendor"))
    assert run([sys.executable, "-I", "-c", code]).strip() == ""
