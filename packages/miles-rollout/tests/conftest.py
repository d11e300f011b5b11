"""Makes `scripted_rollout` importable from the tests of this package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
