from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch",
    "ray",
    "transformers",
    "sglang",
    "pyarrow",
    "sympy",
    "math_verify",
    "reasoning_gym",
    "miles_tito.server.app",
)


def test_importing_the_package_brings_nothing_heavy():
    code = f"import sys, miles_envs.tasks.arithmetic; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists():
    import miles_envs

    assert all(hasattr(miles_envs, name) for name in miles_envs.__all__)
