"""A user's evaluation function in a process of its own: `python -m miles_core.evaluation.call TARGET PATH STEP`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles_tito.shared.plugins import call


def main(target: str, snapshot: str, step: str) -> None:
    """Call the function and print what it returns as the last line."""
    metrics = call(target, Path(snapshot), int(step), keywords={}, what="eval.external")
    print(f"\n{json.dumps(dict(metrics))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
