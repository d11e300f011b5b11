"""The package works when its folder is copied under another name, and importing it stays light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import miles_weightsync

PACKAGE = Path(miles_weightsync.__file__).parent
TESTS = Path(__file__).parent


def test_a_copy_under_another_name_passes_its_tests(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "my_trainer_sync", ignore=shutil.ignore_patterns("__pycache__"))
    tests = tmp_path / "tests"
    tests.mkdir()
    helpers = ("conftest.py", "weightsync_fakes.py", "planner_models.py", "transport_peer.py")
    for name in (
        *helpers,
        "test_push.py",
        "test_plan.py",
        "test_checksum.py",
        "test_planner.py",
        "test_transport_parts.py",
    ):
        text = (TESTS / name).read_text().replace("miles_weightsync", "my_trainer_sync")
        (tests / name).write_text(text)
    (tests / "test_zz_alone.py").write_text(
        "import sys\n\ndef test_the_original_was_not_imported():\n    assert 'miles_weightsync' not in sys.modules\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, miles_weightsync; print(sorted({'torch', 'httpx', 'sglang', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_pushing_imports_no_engine_code() -> None:
    code = "import sys, miles_weightsync.push; print([m for m in sys.modules if m.startswith('sglang')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
