"""The flow tests play against the same scripted parts as the tests of miles-rollout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "miles-rollout" / "tests"))
