"""What is in each wheel, and what it says it needs."""

from __future__ import annotations

import configparser
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from .conftest import PACKAGES, ROOT
from .metadata import closure, find_wheel, wheel_metadata

SIBLINGS = {f"miles-{name}" for name in PACKAGES}

# What installing each package may bring of the heavy four, and which siblings.
MAY_BRING = {
    "miles-tito": set(),
    "miles-rollout": {"miles-tito"},
    "miles-envs": {"miles-tito"},
    "miles-train": {"miles-tito", "torch", "transformers"},
    "miles-weightsync": {"torch"},
    "miles-quant": {"torch"},
    "miles-core": {*SIBLINGS, "ray", "torch", "transformers"} - {"miles-core"},
}


@pytest.mark.parametrize("package", MAY_BRING)
def test_a_wheel_asks_for_no_heavy_package_and_no_sibling_beyond_its_border(package: str, wheels: Path):
    watched = SIBLINGS | {"torch", "ray", "sglang", "transformers"}

    assert closure(wheels, package, stop=frozenset({"torch"})) & watched == MAY_BRING[package]


def test_tito_alone_needs_four_packages(wheels: Path):
    direct = {
        r.partition(">")[0]
        for r in wheel_metadata(wheels, "miles-tito").get_all("Requires-Dist", [])
        if "extra" not in r
    }

    assert direct == {"msgspec", "numpy", "tokenizers", "jinja2"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_its_package_its_types_and_the_licence_and_nothing_else(name: str, wheels: Path):
    with zipfile.ZipFile(find_wheel(wheels, f"miles-{name}")) as archive:
        names = set(archive.namelist())
    info = f"miles_{name}-0.1.0.dist-info"

    assert {n.partition("/")[0] for n in names} == {f"miles_{name}", info}
    assert f"miles_{name}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert not [n for n in names if {"tests", "__pycache__"} & set(Path(n).parts) or Path(n).name.startswith("test_")]


def test_the_wheel_of_core_holds_the_page_of_the_report(wheels: Path):
    with zipfile.ZipFile(find_wheel(wheels, "miles-core")) as archive:
        names = set(archive.namelist())
    assert {f"miles_core/report/page.{ending}" for ending in ("html.j2", "css", "js")} <= names


def test_the_root_wheel_is_metadata_only(wheels: Path):
    with zipfile.ZipFile(find_wheel(wheels, "miles")) as archive:
        assert {n.partition("/")[0] for n in archive.namelist()} == {"miles-0.1.0.dist-info"}


@pytest.mark.parametrize("name", PACKAGES)
def test_console_scripts_of_a_wheel_point_at_functions(name: str, wheels: Path):
    with zipfile.ZipFile(find_wheel(wheels, f"miles-{name}")) as archive:
        entry_points = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        parser = configparser.ConfigParser()
        for entry in entry_points:
            parser.read_string(archive.read(entry).decode())
    scripts = parser["console_scripts"].values() if parser.has_section("console_scripts") else []

    for target in scripts:
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("package", ["miles", *MAY_BRING])
def test_metadata_is_complete(package: str, wheels: Path):
    metadata = wheel_metadata(wheels, package)

    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"]
    assert metadata["Keywords"]
    assert metadata.get_all("Classifier")
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert len(description) > 300, f"README.md of {package} says too little for its page on an index"


def test_every_package_carries_the_same_licence():
    licence = (ROOT / "LICENSE").read_text()

    assert all((ROOT / f"packages/miles-{name}/LICENSE").read_text() == licence for name in PACKAGES)
