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
    helpers = ("conftest.py", "weightsync_fakes.py", "planner_models.py", "transport_peer.py", "staged_bed.py")
    helpers += ("die_with_parent.py", "installed.py")
    for name in (
        *helpers,
        "test_push.py",
        "test_plan.py",
        "test_staged.py",
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


def test_a_copy_without_its_compiled_kernels_makes_the_same_deltas_and_says_so_once(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "*.native")
    shutil.copytree(PACKAGE, tmp_path / "my_trainer_sync", ignore=left_out)
    code = (
        "import numpy as np; from NAME.delta import apply_blob, encode\n"
        "old = np.arange(9000, dtype=np.uint16); new = old + (old % 7 == 0)\n"
        "for codec in ('fast', 'small'):\n"
        "    blob, target = encode(old, new, codec=codec), old.copy(); apply_blob(target, blob)\n"
        "    assert (target == new).all(); print(blob.hex())\n"
    )
    env, outputs = {**os.environ, "PYTHONPATH": str(tmp_path)}, list[str]()
    for name in ("my_trainer_sync", "miles_weightsync"):
        command = [sys.executable, "-c", code.replace("NAME", name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        outputs.append(done.stdout)
        said = done.stderr.splitlines()
        assert len([line for line in said if "python -m my_trainer_sync.native.build" in line]) == (name[:2] == "my")
    assert outputs[0] == outputs[1]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, miles_weightsync; print(sorted({'torch', 'httpx', 'sglang', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_pushing_imports_no_engine_code() -> None:
    code = "import sys, miles_weightsync.push; print([m for m in sys.modules if m.startswith('sglang')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
