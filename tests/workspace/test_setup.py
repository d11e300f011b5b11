"""setup.sh, make and CI: cheap when nothing changed, clear when something is missing. Nothing here installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("setup.sh", "Makefile", "pyproject.toml", "uv.lock", "scripts", ".ci")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, without an environment."""
    for part in PARTS:
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    for project in ROOT.glob("packages/*/pyproject.toml"):
        target = tmp_path / project.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copy(project, target)
    return tmp_path


def run(checkout: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def install(checkout: Path) -> None:
    """An environment that looks as set-up leaves it: an interpreter, and the stamp of these files."""
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(shutil.which("true") or "/bin/true")
    (checkout / ".venv/miles-setup").write_text(run(checkout, "./setup.sh", "--digest").stdout)


def test_set_up_does_nothing_in_under_a_second_when_nothing_changed(checkout: Path):
    install(checkout)

    started = time.monotonic()
    done = run(checkout, "./setup.sh", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "changed",
    [
        "uv.lock",
        "packages/miles-tito/pyproject.toml",
        "scripts/without-dependencies.txt",
        "scripts/references.txt",
    ],
)
def test_set_up_starts_when_what_it_installs_has_changed(changed: str, checkout: Path):
    install(checkout)
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")

    # Without a usable interpreter it stops at its first step, which is enough to see that it started.
    done = run(checkout, "./setup.sh", PATH="/usr/bin:/bin", PYTHON="no-such-python", HOME=str(checkout))
    assert done.returncode == 1
    assert "no Python 3.11 or newer (tried no-such-python" in done.stderr


def test_no_python_is_told_with_what_was_tried_and_what_to_install(checkout: Path):
    done = run(checkout, "./setup.sh", PATH="/usr/bin:/bin", PYTHON="no-such-python", HOME=str(checkout))

    assert done.returncode == 1
    assert "apt-get install python3" in done.stderr
    assert not (checkout / ".venv/miles-setup").exists()


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_the_two_commands_of_the_readme_set_up_first(target: str, checkout: Path):
    done = run(checkout, "make", "--dry-run", target)

    assert done.stdout.splitlines()[0] == "./setup.sh"


def test_ci_runs_make_test_without_standard_input(checkout: Path):
    (checkout / "Makefile").write_text("test:\n\t@cat; echo asked; exit 3\n")

    done = run(checkout, "bash", ".ci/run", CI="true")
    assert done.returncode != 0
    assert done.stdout.strip() == "asked"


def test_a_failed_check_fails_the_whole_and_the_others_still_run(checkout: Path):
    tools = checkout / ".venv/bin"
    tools.mkdir(parents=True)
    for name, status in {"ruff": 0, "python": 1, "lint-imports": 0}.items():
        (tools / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tools / name).chmod(0o755)

    done = run(checkout, "scripts/test.sh", "lint")
    assert done.returncode == 1
    assert "== pyright: FAILED" in done.stdout
    assert "== import borders: passed" in done.stdout
    assert done.stderr.strip().endswith("test: failed: pyright")
