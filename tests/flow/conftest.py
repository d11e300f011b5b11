"""The flow tests play against the same scripted parts as the tests of the packages."""

import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"

sys.path[:0] = [
    str(Path(__file__).parent),
    str(PACKAGES / "miles-rollout" / "tests"),
    str(PACKAGES / "miles-weightsync" / "tests"),
]
