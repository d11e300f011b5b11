from __future__ import annotations

from importlib import metadata

import pytest
from miles_rollout.engines import EngineVersionError, check_sglang, check_smg
from miles_rollout.engines.versions import SMG, SUPPORTED, check_server_version

CPU = {"sglang": "0.5.23", **SUPPORTED["0.5.23"].cpu}
CUDA = {"sglang": "0.5.23", **SUPPORTED["0.5.23"].cuda}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_the_tested_versions_pass_and_are_named(installed: dict[str, str]):
    installed.update(CPU, torch="2.13.0+cpu")
    assert "sglang 0.5.23 (cpu: torch 2.13.0+cpu" in check_sglang("cpu")


def test_a_missing_sglang_is_named_with_the_command_that_installs_it(installed: dict[str, str]):
    with pytest.raises(EngineVersionError, match=r"not installed.*0\.5\.23.*pip install --no-deps sglang==0\.5\.23"):
        check_sglang("cpu")


def test_an_untested_sglang_is_refused_with_both_versions(installed: dict[str, str]):
    installed.update(CPU, sglang="0.6.0")
    with pytest.raises(EngineVersionError, match=r"SGLang 0\.6\.0 is installed.*runs SGLang 0\.5\.23"):
        check_sglang("cpu")


def test_every_wrong_companion_is_named_at_once(installed: dict[str, str]):
    installed.update(CPU, transformers="4.57.0")
    del installed["xgrammar"]
    with pytest.raises(EngineVersionError) as caught:
        check_sglang("cpu")
    assert "transformers 4.57.0 (needs 5.19.0)" in str(caught.value)
    assert "xgrammar missing (needs 0.2.7)" in str(caught.value)


def test_a_cpu_install_is_refused_on_a_gpu(installed: dict[str, str]):
    installed.update(CPU, torch="2.13.0+cpu")
    with pytest.raises(EngineVersionError, match=r"cannot run on cuda.*sglang-kernel missing.*without CUDA"):
        check_sglang("cuda")


def test_a_gpu_install_passes_on_a_gpu(installed: dict[str, str]):
    installed.update(CUDA)
    assert "sglang 0.5.23 (cuda" in check_sglang("cuda")


@pytest.mark.parametrize("version", [None, "1.12.0"])
def test_a_router_of_another_version_is_refused(installed: dict[str, str], version: str | None):
    if version:
        installed["smg"] = version
    with pytest.raises(EngineVersionError, match=rf"{version or 'not installed'}.*smg=={SMG}"):
        check_smg()


def test_an_external_server_of_another_version_is_refused_with_its_address():
    assert "0.5.23" in check_server_version("0.5.23", "http://there")
    with pytest.raises(EngineVersionError, match=r"http://there runs SGLang 0\.4\.9; .* 0\.5\.23"):
        check_server_version("0.4.9", "http://there")
