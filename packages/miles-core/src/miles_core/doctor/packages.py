"""What is installed: torch, SGLang, the router, Ray, and every requirement that a Miles package declares."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata

from miles_rollout.engines import EngineVersionError, check_sglang, check_smg, has_gpu, resolve_device
from miles_rollout.engines.versions import Device
from packaging.requirements import Requirement

from miles_core.config import Config

from .results import CheckResult, Level

MILES = ("core", "tito", "rollout", "envs", "train", "weightsync", "quant")
_ASK_TORCH = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)"

Version = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch(config: Config, ask: Sequence[str] = (sys.executable, "-c", _ASK_TORCH)) -> Iterator[CheckResult]:
    """Imported in another process: a broken build may crash, and a good one takes seconds."""
    result = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        fix = "uv pip install --torch-backend=auto torch"
        yield CheckResult("torch", "fail", f"torch cannot be imported: {reason}", fix)
        return
    version, gpus = result.stdout.split()
    if int(gpus):
        yield CheckResult("torch", "ok", f"torch {version} with {gpus} GPUs")
    elif config.train.device == "cuda" or (config.train.device == "auto" and has_gpu()):
        message = f"torch {version} sees no GPU, but the machine or train.device names one"
        fix = "uv pip install --torch-backend=auto torch; compare its CUDA with nvidia-smi; or train.device = cpu"
        yield CheckResult("torch", "fail", message, fix)
    else:
        yield CheckResult("torch", "ok", f"torch {version} on the CPU")


def sglang(config: Config) -> Iterator[CheckResult]:
    """The exact release for each device that engines start on."""
    devices: set[Device] = {resolve_device(engine.device) for engine in config.engines.values() if not engine.urls}
    if not devices:
        yield CheckResult("sglang", "ok", "no engine is started here")
    for device in devices:
        yield _version_check("sglang", partial(check_sglang, device), level="fail")


def router(config: Config) -> Iterator[CheckResult]:
    """Needed as soon as one table has more than one server."""
    is_needed = any(engine.num_servers > 1 for engine in config.engines.values())
    yield _version_check("router", check_smg, level="fail" if is_needed else "warn")


def ray(version: Version = installed) -> Iterator[CheckResult]:
    found = version("ray")
    if found is None:
        yield CheckResult("ray", "fail", "ray is not installed", "uv pip install 'ray>=2.50'")
    else:
        yield CheckResult("ray", "ok", f"ray {found}")


def requirements(
    version: Version = installed, requires: Callable[[str], Sequence[str] | None] = metadata.requires
) -> Iterator[CheckResult]:
    """Every requirement that Miles declares against what is installed; those of an extra only where it is installed.

    SGLang and its router have checks of their own, which know the exact releases.
    """
    wrong: list[CheckResult] = []
    count = 0
    for package in (f"miles-{part}" for part in MILES):
        if version(package) is None:
            continue
        for line in requires(package) or ():
            requirement = Requirement(line)
            found = version(requirement.name)
            is_optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            if requirement.name in ("sglang", "smg") or (found is None and is_optional):
                continue
            count += 1
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append(_mismatch(package, requirement, found))
    yield from wrong or [CheckResult("packages", "ok", f"{count} requirements of the Miles packages are met")]


def _mismatch(package: str, requirement: Requirement, found: str | None) -> CheckResult:
    state = "is not installed" if found is None else f"{found} is installed"
    wanted = f"{requirement.name}{requirement.specifier}"
    message = f"{requirement.name} {state}, but {package} needs {wanted}"
    return CheckResult("packages", "fail", message, f"uv pip install '{wanted}'")


def _version_check(name: str, check: Callable[[], str], *, level: Level) -> CheckResult:
    try:
        return CheckResult(name, "ok", check())
    except EngineVersionError as error:
        # "What is wrong. Install it: command": the sentence that leads to the command says nothing by itself.
        told, _, fix = str(error).rpartition(": ")
        message = told.rpartition(". ")[0] or told
        return CheckResult(name, level, message, fix)
