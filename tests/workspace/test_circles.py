"""No modules import one another in a circle, nor through `__init__`, where import-linter is blind."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

house = runpy.run_path(str(ROOT / "scripts/house.py"))


@pytest.mark.parametrize("package", house["PACKAGES"])
def test_no_modules_of_a_package_import_one_another_in_a_circle(package: str):
    assert house["circles"](f"miles_{package}") == []


def test_a_circle_through_deferred_imports_and_through_init_is_found_and_one_for_the_type_checker_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {
        "__init__": "from knotted import deferred",
        "deferred": "def f():\n    from knotted import other",
        "other": "from knotted.deferred import f",
        "inner/__init__": "from knotted.inner.named import X",
        "inner/named": "from knotted.inner import X",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from knotted import apart",
        "apart": "from knotted import typed",
    }
    for name, text in files.items():
        (tmp_path / "knotted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "knotted" / f"{name}.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert house["circles"]("knotted") == [
        ["knotted.deferred", "knotted.other"],
        ["knotted.inner", "knotted.inner.named"],
    ]
