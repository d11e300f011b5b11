"""uv.lock pins both installs, names no address, and says what the packages say."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MEMBERS = [ROOT, *sorted((ROOT / "packages").iterdir())]


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text())


def export(*flags: str) -> dict[str, set[str]]:
    """Package -> locked versions of one install, read from the lock without an index."""
    command = 'source scripts/find-uv.sh && "$UV" export --frozen --no-hashes --no-annotate --no-emit-workspace'
    done = subprocess.run(
        ["bash", "-c", f"{command} {' '.join(flags)}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    pinned: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", done.stdout, flags=re.MULTILINE):
        pinned.setdefault(name, set()).add(version)
    return pinned


def test_the_lock_names_no_address():
    text = (ROOT / "uv.lock").read_text()

    assert re.findall(r"[a-z]+://\S*", text) == []
    assert set(re.findall(r'registry = "([^"]*)"', text)) == {"index"}
    assert "wheels = [" not in text


def test_no_file_of_the_workspace_names_an_index():
    files = [
        *ROOT.glob("packages/*/pyproject.toml"),
        ROOT / "pyproject.toml",
        ROOT / "setup.sh",
        *ROOT.glob("scripts/*"),
    ]

    named = {f.name: re.findall(r"https?://\S+", f.read_text()) for f in files if f.is_file()}
    assert {name: urls for name, urls in named.items() if urls} == {}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_the_lock_was_made_from_the_dependencies_that_the_packages_declare(member: Path, lock: dict[str, Any]):
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    declared = {_plain(r, extra="") for r in project["dependencies"]}
    for extra, requirements in project.get("optional-dependencies", {}).items():
        declared |= {_plain(r, extra=extra) for r in requirements}
    (entry,) = [p for p in lock["package"] if p["name"] == project["name"]]
    locked = set()
    for item in entry.get("metadata", {}).get("requires-dist", []):
        extra = re.search(r"extra == '([^']+)'", item.get("marker", ""))
        locked.add((item["name"], item.get("specifier", ""), extra.group(1) if extra else ""))

    assert _without_self(locked) == _without_self(declared), "run `make lock`"


def test_the_cpu_install_has_the_cpu_torch_and_nothing_of_cuda():
    pinned = export("--group", "cpu", "--group", "dev")

    assert pinned["torch"] == {"2.13.0"}
    assert pinned["ray"] == {"2.60.0"}
    assert [name for name in pinned if re.match(r"nvidia|cuda|triton|sglang|llama", name)] == []


def test_the_gpu_install_resolves_to_the_supported_engine_and_its_own_torch():
    pinned = export("--extra", "all")

    assert pinned["sglang"] == {"0.5.23"}
    assert pinned["smg"] == {"1.13.0"}
    assert pinned["torch"] == {"2.14.1"}
    assert "megatron-core" in pinned
    assert [name for name in pinned if name.startswith("nvidia-")]


def test_the_cpu_engine_is_the_version_that_the_gpu_install_pins():
    alone = (ROOT / "scripts/without-dependencies.txt").read_text()
    gpu = export("--extra", "all")

    pins = dict(re.findall(r"^([a-z-]+)==(\S+)$", alone, flags=re.MULTILINE))
    assert pins.keys() == {"sglang", "apache-tvm-ffi", "xgrammar", "smg"}
    assert {name: {version} for name, version in pins.items()} == {name: gpu[name] for name in pins}


def _plain(requirement: str, *, extra: str) -> tuple[str, str, str]:
    parsed = Requirement(requirement)
    return parsed.name, str(parsed.specifier), extra


def _without_self(items: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """uv leaves out the version of a sibling in this workspace, and expands the root's own extras."""
    return {
        (name, "" if name.startswith("miles") else _sorted(spec), extra)
        for name, spec, extra in items
        if name != "miles"
    }


def _sorted(specifier: str) -> str:
    return ",".join(sorted(specifier.split(",")))
