"""Which SGLang this version of Miles runs, and what must be installed beside it.

The CPU launcher patches SGLang in a handful of places, and the sampling contract (log-probs, weight versions, pause
modes) was read from these exact releases. Any other is refused before a server starts, with the command that fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

from miles_rollout.engines.errors import EngineVersionError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class SGLangRelease:
    """The packages that a release of SGLang was tested with, by device."""

    cpu: Mapping[str, str] = field(default_factory=dict[str, str])
    """The few of SGLang's requirements that matter without a GPU; the wheel itself is installed with --no-deps."""
    cuda: Mapping[str, str] = field(default_factory=dict[str, str])
    """Installed by the wheel's own requirements; named here because a CPU install lacks them."""


SUPPORTED: Mapping[str, SGLangRelease] = {
    "0.5.23": SGLangRelease(
        cpu={
            "torch": "2.13.0",
            "transformers": "5.19.0",
            "tokenizers": "0.23.2",
            "xgrammar": "0.2.7",
            "apache-tvm-ffi": "0.1.11",
        },
        cuda={"torch": "2.14.1", "transformers": "5.19.0", "sglang-kernel": "0.4.10"},
    ),
}
SMG = "1.13.0"


def check_sglang(device: Device) -> str:
    """Check that SGLang and what it needs on `device` are installed in supported versions. SGLang is not imported.

    Returns:
        one line for a report, such as `sglang 0.5.23 (cpu: torch 2.13.0+cpu, …)`.

    Raises:
        EngineVersionError: with the installed and the supported versions and the pip command.
    """
    installed = _version("sglang")
    if installed is None:
        raise EngineVersionError(
            f"SGLang is not installed; Miles runs {_list(SUPPORTED)}. Install it: {install_command(device)}"
        )
    release = SUPPORTED.get(installed)
    if release is None:
        raise EngineVersionError(
            f"SGLang {installed} is installed; this version of Miles runs {_list(SUPPORTED)} and nothing else. "
            f"Install a supported one: {install_command(device)}"
        )
    found = {name: _version(name) for name in getattr(release, device)}
    wrong = [
        f"{name} {found[name] or 'missing'} (needs {needed})"
        for name, needed in getattr(release, device).items()
        if _public(found[name]) != needed
    ]
    if device == "cuda" and (found["torch"] or "").endswith("+cpu"):
        wrong.append(f"torch {found['torch']} is a build without CUDA")
    if wrong:
        raise EngineVersionError(
            f"SGLang {installed} cannot run on {device} with what is installed: {'; '.join(wrong)}. "
            f"Fix: {install_command(device, installed)}"
        )
    return f"sglang {installed} ({device}: {', '.join(f'{name} {version}' for name, version in found.items())})"


def check_smg() -> str:
    """Check that the router in front of several engines is installed in the supported version."""
    installed = _version("smg")
    if installed != SMG:
        state = "is not installed" if installed is None else f"{installed} is installed"
        raise EngineVersionError(
            f"smg {state}; more than one engine needs smg {SMG}, the router with session affinity. "
            f"Install it: pip install --no-deps smg=={SMG}"
        )
    return f"smg {installed}"


def check_server_version(version: str | None, url: str) -> str:
    """Check the version that a running server reports at `/server_info`."""
    if version not in SUPPORTED:
        raise EngineVersionError(
            f"The server at {url} runs SGLang {version or 'of an unknown version'}; this version of Miles talks to "
            f"{_list(SUPPORTED)}. Start it with: {install_command('cuda')}"
        )
    return f"sglang {version} at {url}"


def install_command(device: Device, version: str | None = None) -> str:
    """The command that installs `version` (default: the newest supported) and its companions for `device`."""
    version = version or list(SUPPORTED)[-1]
    if device == "cuda":
        return f"pip install 'sglang=={version}'"
    pins = dict(SUPPORTED[version].cpu)
    # The wheel's own requirements are a CUDA build of torch and 3 GB of kernels, hence --no-deps.
    packages = " ".join(f"{name}=={pin}" for name, pin in pins.items() if name != "torch")
    return (
        f"uv pip install --torch-backend=cpu torch=={pins['torch']} && "
        f"pip install --no-deps sglang=={version} {packages}"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str | None) -> str | None:
    """Without the local part: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0] if version else None


def _list(versions: Mapping[str, SGLangRelease]) -> str:
    return "SGLang " + ", ".join(versions)
