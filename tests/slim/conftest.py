"""Wheels of every package, and environments that hold nothing but one of them and what it asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tito", "rollout", "envs", "train", "weightsync", "quant", "core")


def run(command: Sequence[str | Path], *, cwd: Path = ROOT, timeout_s: float = 120) -> str:
    """Standard output of `command`; its error output is in the failure's message."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class BareEnvironment:
    """A virtual environment without pip, and the uv that fills it."""

    python: Path
    uv: str
    wheels: Path
    constraints: Path

    def install(self, *requirements: str, with_dependencies: bool = True) -> None:
        """Install at the locked versions, from the cache that set-up filled; from the index where that lacks one."""
        flags = [] if with_dependencies else ["--no-deps"]
        command = [self.uv, "pip", "install", "--quiet", "--python", str(self.python), *flags]
        command += ["--find-links", str(self.wheels), "--constraints", str(self.constraints), *requirements]
        offline = subprocess.run([*command, "--offline"], cwd=ROOT, capture_output=True, text=True, timeout=120)
        if offline.returncode != 0:
            run(command)

    def distributions(self) -> set[str]:
        listing = run([self.uv, "pip", "list", "--quiet", "--format", "freeze", "--python", self.python])
        return {line.partition("==")[0].lower() for line in listing.splitlines()}

    def evaluate(self, code: str) -> str:
        return run([self.python, "-I", "-W", "error", "-c", code]).strip()


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the seven packages and of the root."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in [ROOT, *(ROOT / "packages" / f"miles-{name}" for name in PACKAGES)]:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source)
    return folder


@pytest.fixture(scope="session")
def uv() -> str:
    found = run(["bash", "-c", 'source scripts/find-uv.sh && readlink -f "$(command -v "$UV")"'])
    return found.splitlines()[-1]


@pytest.fixture
def bare(tmp_path: Path, uv: str, wheels: Path) -> BareEnvironment:
    constraints = tmp_path / "locked.txt"
    export = [uv, "export", "--frozen", "--no-hashes", "--no-annotate", "--no-emit-workspace"]
    constraints.write_text(run([*export, "--group", "cpu"]))
    environment = tmp_path / "venv"
    run([uv, "venv", "--quiet", "--python", sys.executable, environment])
    return BareEnvironment(python=environment / "bin/python", uv=uv, wheels=wheels, constraints=constraints)
