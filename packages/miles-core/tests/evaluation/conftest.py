"""Puts the scripts, and the virtual clock of the rollout tests, on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "miles-rollout" / "tests")]
