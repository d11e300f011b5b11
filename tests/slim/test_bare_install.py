"""Each package installs alone and brings nothing heavy that it has no use for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import BareEnvironment
from .metadata import closure

HEAVY = frozenset({"torch", "ray", "sglang", "transformers"})

pytestmark = pytest.mark.slow

# What must work in an environment that the package alone has filled.
LIGHT = {
    "miles-tito": ["miles_tito", "miles_tito.records", "miles_tito.records.encoding", "miles_tito.tokens.tokenizer"],
    "miles-tito[server]": ["miles_tito.server.app", "miles_tito.client"],
    "miles-rollout": ["miles_rollout", "miles_rollout.config", "miles_rollout.buffer", "miles_rollout.engines.server"],
    "miles-envs": ["miles_envs", "miles_envs.rewards", "miles_envs.shapes"],
}

# These need torch or Ray to work. Reading their configuration needs neither, and the test downloads neither.
HEAVY_LATER = {
    "miles-train": ["miles_train", "miles_train.config", "miles_train.packing"],
    "miles-weightsync": ["miles_weightsync", "miles_weightsync.config"],
    "miles-quant": ["miles_quant"],
    "miles-core": ["miles_core", "miles_core.cli", "miles_core.run.loop"],
}


def import_and_list_heavy(modules: list[str]) -> str:
    return f"import sys, {', '.join(modules)}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"


@pytest.mark.parametrize("requirement", LIGHT)
def test_a_light_package_installs_and_imports_without_anything_heavy(requirement: str, bare: BareEnvironment):
    bare.install(f"{requirement}==0.1.0")

    assert bare.distributions() & HEAVY == set()
    assert bare.evaluate(import_and_list_heavy(LIGHT[requirement])) == ""


@pytest.mark.parametrize("package", HEAVY_LATER)
def test_a_heavy_package_imports_and_reads_its_config_without_torch_and_ray(
    package: str, bare: BareEnvironment, wheels: Path
):
    needed = closure(wheels, package, stop=HEAVY) - HEAVY
    bare.install(package, *needed, with_dependencies=False)

    assert bare.evaluate(import_and_list_heavy(HEAVY_LATER[package])) == ""
