"""Every metric that the sources name is in the catalogue."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from miles_core.monitor.names import METRICS, describe

PACKAGES = ("miles_core", "miles_rollout", "miles_train", "miles_weightsync")
PARTS = {name.split("/")[0] for name in METRICS}
NO_METRICS = {"eval/step"}
"""The axis of evaluations in W&B."""


def names_in(package: str) -> Iterator[tuple[str, str]]:
    """Name and file of each string that looks like a metric; what is filled in at run time reads `x`."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = _text(node)
            if re.fullmatch(r"[a-z_]+(/[\w@]*[a-z0-9])+", text) and text.split("/")[0] in PARTS:
                yield text, str(file)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_metric_in_the_sources_is_described(package):
    # Of a name whose end is filled in, any member of the catalogue is a witness.
    unknown = {
        f"{name} ({file})"
        for name, file in names_in(package)
        if describe(name) is None and name not in NO_METRICS and not (name.endswith("/x") and name[:-2] in PARTS)
    }
    assert not unknown


def test_the_sources_name_metrics_at_all():
    assert len({name for package in PACKAGES for name, _ in names_in(package)}) > 80


def test_the_narrowest_family_describes_a_name():
    assert describe("buffer/discarded/zero_spread") == METRICS["buffer/discarded/*"]
    assert describe("sync/load_seconds") == METRICS["sync/*_seconds"]
    assert describe("sync/pause_seconds") == METRICS["sync/pause_seconds"]
    assert describe("eval/maths/score") == METRICS["eval/*"]
